// Phase 2: merge a phase-1 result with the near sources (the partial sum), forward and backward.
#pragma once

#include "scores.h"

namespace attnres {

template <class P>
struct IntraBlock {
  std::vector<Rows<P>> near;
  Lines<Number<P>> query, norm_weight;
  int64_t tokens, dim;
  Number<P> eps, scale, norm_eps;
  int64_t count() const { return near.size(); }
  Row<P> next(int64_t j, int64_t t) const { return near[j][std::min(t + 1, tokens - 1)]; }
};

// Scores of the near sources to weights, in place; returns the weight of the phase-1 result.
template <class A>
inline A merge_weights(A lse, A* scores, int64_t count) {
  A largest = lse;
  for (int64_t j = 0; j < count; ++j) largest = std::max(largest, scores[j]);
  const A far = exponential(lse - largest);
  A total = far;
  for (int64_t j = 0; j < count; ++j) total += scores[j] = exponential(scores[j] - largest);
  for (int64_t j = 0; j < count; ++j) scores[j] /= total;
  return far / total;
}

template <class P, class F>
inline void merge(const IntraBlock<P>& part, Row<P> mixed, Number<P> far, const Number<P>* near, int64_t t, F&& sink) {
  for_tiles<Number<P>>(part.dim, [&](int64_t d, auto extent) {
    auto total = load(mixed, d, extent);
    if (part.count() > 0) total.scale(far);
    for (int64_t j = 0; j < part.count(); ++j) total.add(near[j], load(part.near[j][t], d, extent));
    if (part.scale != 1) total.scale(part.scale);
    sink(total, d, extent);
  });
}

template <class P>
void intra_block_forward(
    const IntraBlock<P>& part, const Rows<P>& mixed, const Number<P>* lse, const Update<P>* update, Sinks<P> out,
    Number<P>* weights) {
  const int64_t count = part.count(), dim = part.dim;
  for_tokens(part.tokens, (count + 2) * dim, [&](int64_t begin, int64_t end) {
    Lines<Number<P>> line(part.norm_weight.size());
    for (int64_t t = begin; t < end; ++t) {
      if (update) update->run(t, dim);
      Number<P>* near = weights + t * count;
      for (int64_t j = 0; j < count; ++j) {
        const auto sums = row_sums<false, P>(part.near[j][t], part.next(j, t), part.query.data(), nullptr, dim);
        near[j] = sums.query * inverse_rms(sums.square, dim, part.eps);
      }
      const Number<P> far = merge_weights(lse[t], near, count);
      if (line.empty()) {
        merge(part, mixed[t], far, near, t, [&](auto tile, int64_t d, auto e) { store(tile, out[t], d, e); });
        continue;
      }
      FollowingNorm<P> norm(line.data(), out[t]);
      merge(part, mixed[t], far, near, t, [&](auto tile, int64_t d, auto) { norm.take(tile, d); });
      norm.finish(part.norm_weight.data(), dim, part.norm_eps);
    }
  });
}

template <class P>
struct IntraBlockGrads {
  Sinks<P> mixed;
  Number<P>* lse;
  std::vector<Sinks<P>> near;
};

// Puts the given gradient into a line, and returns its product with the output.
template <class P>
inline Number<P> load_product(const Rows<P>& grad, const Rows<P>& out, int64_t t, int64_t after, int64_t dim, Number<P>* line) {
  Tile<Number<P>> total;
  for_tiles<Number<P>>(dim, [&](int64_t d, auto extent) {
    prefetch(grad[after], d);
    prefetch(out[after], d);
    const auto given = load(grad[t], d, extent);
    store(given, line, d);
    total.add(given, load(out[t], d, extent));
  });
  return total.sum();
}

template <class P>
inline void near_grads(
    const IntraBlock<P>& part, const IntraBlockGrads<P>& grads, const Number<P>* weight, Number<P> far,
    const ScoreGrad<Number<P>>* factors, const Number<P>* line, int64_t t, Number<P>* query_grad) {
  for_tiles<Number<P>>(part.dim, [&](int64_t d, auto extent) {
    const auto given = load(line, d), query = load(part.query.data(), d);
    auto query_sum = load(query_grad, d), result = given;
    result.scale(part.scale * far);
    store(result, grads.mixed[t], d, extent);
    for (int64_t j = 0; j < part.count(); ++j) {
      const auto value = load(part.near[j][t], d, extent);
      result = given;
      result.scale(part.scale * weight[j]);
      result.add(factors[j].query, query);
      result.add(factors[j].value, value);
      query_sum.add(factors[j].query, value);
      store(result, grads.near[j][t], d, extent);
    }
    store(query_sum, query_grad, d);
  });
}

template <class P>
void intra_block_gradient(
    const IntraBlock<P>& part, const Rows<P>& grad, const Rows<P>& out, const Number<P>* weights,
    const IntraBlockGrads<P>& grads, TokenSum<Number<P>>& query_grad) {
  const int64_t count = part.count(), dim = part.dim;
  query_grad.run([&](int64_t begin, int64_t end, Number<P>* sum) {
    std::vector<ScoreGrad<Number<P>>> factors(count);
    Lines<Number<P>> line(padded<Number<P>>(dim));
    for (int64_t t = begin; t < end; ++t) {
      const Number<P>* weight = weights + t * count;
      const Number<P> mean = load_product(grad, out, t, std::min(t + 1, part.tokens - 1), dim, line.data());
      Number<P> far = 1, lse_grad = 0;
      for (int64_t j = 0; j < count; ++j) {
        const auto sums = row_sums<true, P>(part.near[j][t], part.next(j, t), part.query.data(), line.data(), dim);
        const Number<P> inverse = inverse_rms(sums.square, dim, part.eps);
        const Number<P> ds = weight[j] * (part.scale * sums.grad - mean);
        factors[j] = {ds, sums.query * inverse, inverse, dim};
        far -= weight[j];
        lse_grad -= ds;
      }
      grads.lse[t] = lse_grad;
      near_grads(part, grads, weight, far, factors.data(), line.data(), t, sum);
    }
  });
}

}  // namespace attnres
