// One read of all sources: forward, and backward from nothing but the sources.
#pragma once

#include "scores.h"

namespace attnres {

template <class P>
struct Read {
  std::vector<Rows<P>> sources;
  Lines<Number<P>> query, norm_weight;
  int64_t tokens, dim;
  Number<P> eps, scale, norm_eps;
  int64_t count() const { return sources.size(); }
  int64_t width() const { return padded<Number<P>>(dim); }
};

// What one token works with.
template <class P>
struct ReadScratch {
  std::vector<Row<P>> rows;
  std::vector<Number<P>> inverse, score, weight, product;  // [sources]
  std::vector<ScoreGrad<Number<P>>> factors;               // [sources]
  Lines<Number<P>> grad, mixed;
  ReadScratch(const Read<P>& read, bool backward)
      : rows(read.count()), inverse(read.count()), score(read.count()), weight(backward ? read.count() : 0),
        product(weight.size()), factors(weight.size()), grad(backward ? read.width() : 0),
        mixed(read.norm_weight.empty() ? 0 : read.width()) {}
};

// Scores of one token, and with a gradient its product with each source.
template <bool WithGrad, class P>
inline void score_rows(const Read<P>& read, ReadScratch<P>& scratch, int64_t t) {
  const int64_t count = read.count(), after = std::min(t + 1, read.tokens - 1);
  for (int64_t i = 0; i < count; ++i) {
    scratch.rows[i] = read.sources[i][t];
    const auto sums = row_sums<WithGrad, P>(
        scratch.rows[i], read.sources[i][after], read.query.data(), scratch.grad.data(), read.dim);
    scratch.inverse[i] = sums.square;
    scratch.score[i] = sums.query;
    if constexpr (WithGrad) scratch.product[i] = sums.grad;
  }
  for (int64_t i = 0; i < count; ++i) scratch.inverse[i] = inverse_rms(scratch.inverse[i], read.dim, read.eps);
  for (int64_t i = 0; i < count; ++i) scratch.score[i] *= scratch.inverse[i];
}

// Calls sink(tile, offset, extent) with scale * sum_i weights[i] * rows[i].
template <class P, class F>
inline void mix(const Read<P>& read, const Row<P>* rows, const Number<P>* weights, F&& sink) {
  const int64_t count = read.count();
  for_tiles<Number<P>>(read.dim, [&](int64_t d, auto extent) {
    auto total = load(rows[0], d, extent);
    total.scale(weights[0]);
    for (int64_t i = 1; i < count; ++i) total.add(weights[i], load(rows[i], d, extent));
    if (read.scale != 1) total.scale(read.scale);
    sink(total, d, extent);
  });
}

// Weights and log-sum-exp may be absent, and so may an update of the last source.
template <class P>
void read_forward(
    const Read<P>& read, const Update<P>* update, Sinks<P> mixed, Number<P>* weights, Number<P>* lse) {
  const int64_t count = read.count();
  for_tokens(read.tokens, count * read.dim, [&](int64_t begin, int64_t end) {
    ReadScratch<P> scratch(read, false);
    for (int64_t t = begin; t < end; ++t) {
      if (update) update->run(t, read.dim);
      score_rows<false>(read, scratch, t);
      const Number<P> total = softmax(scratch.score.data(), count);
      if (lse) lse[t] = total;
      if (weights) std::copy(scratch.score.begin(), scratch.score.end(), weights + t * count);
      const Row<P>* rows = scratch.rows.data();
      if (scratch.mixed.empty()) {
        mix(read, rows, scratch.score.data(), [&](auto tile, int64_t d, auto e) { store(tile, mixed[t], d, e); });
      } else {
        FollowingNorm<P> norm(scratch.mixed.data(), mixed[t]);
        mix(read, rows, scratch.score.data(), [&](auto tile, int64_t d, auto) { norm.take(tile, d); });
        norm.finish(read.norm_weight.data(), read.dim, read.norm_eps);
      }
    }
  });
}

// Gradients of the three results; each may be absent.
template <class P>
struct ReadGrads {
  const Rows<P>* mixed;
  const Number<P>* weights;
  const Number<P>* lse;
};

template <class P>
inline void load_grad(const Read<P>& read, const ReadGrads<P>& grads, int64_t t, ReadScratch<P>& scratch) {
  if (grads.mixed == nullptr) return std::fill(scratch.grad.begin(), scratch.grad.end(), 0);
  const Number<P> factor = read.norm_weight.empty() ? read.scale : 1;
  for_tiles<Number<P>>(read.dim, [&](int64_t d, auto extent) {
    auto tile = load((*grads.mixed)[t], d, extent);
    tile.scale(factor);
    store(tile, scratch.grad.data(), d);
  });
}

// Through the norm that follows: grad becomes out_scale * d loss / d mixed; adds to the norm weight's gradient.
template <class P>
inline void through_norm(const Read<P>& read, ReadScratch<P>& scratch, Number<P>* norm_grad) {
  Number<P>*mixed = scratch.mixed.data(), *grad = scratch.grad.data();
  mix(read, scratch.rows.data(), scratch.weight.data(), [&](auto tile, int64_t d, auto) { store(tile, mixed, d); });
  Tile<Number<P>> square, product;
  for (int64_t d = 0; d < read.width(); d += Tile<Number<P>>::width) {
    auto value = load(mixed, d);
    square.add(value, value);
    value.multiply(load(read.norm_weight.data(), d));
    product.add(value, load(grad, d));
  }
  const Number<P> rho = inverse_rms(square.sum(), read.dim, read.norm_eps);
  const Number<P> pull = rho * rho * rho / read.dim * product.sum();
  for (int64_t d = 0; d < read.width(); ++d) {
    norm_grad[d] += grad[d] * mixed[d] * rho;
    grad[d] = read.scale * (rho * read.norm_weight[d] * grad[d] - pull * mixed[d]);
  }
}

template <class P>
inline void score_token(const Read<P>& read, ReadScratch<P>& scratch, int64_t t, Number<P>* norm_grad) {
  score_rows<true>(read, scratch, t);
  scratch.weight = scratch.score;
  softmax(scratch.weight.data(), read.count());
  if (read.norm_weight.empty()) return;
  through_norm(read, scratch, norm_grad);
  for (int64_t i = 0; i < read.count(); ++i) {
    Tile<Number<P>> total;
    for_tiles<Number<P>>(read.dim, [&](int64_t d, auto extent) {
      total.add(load(scratch.rows[i], d, extent), load(scratch.grad.data(), d));
    });
    scratch.product[i] = total.sum();
  }
}

template <class P>
inline void softmax_grad(const Read<P>& read, const ReadGrads<P>& grads, ReadScratch<P>& scratch, int64_t t) {
  const int64_t count = read.count();
  const Number<P> lse_grad = grads.lse ? grads.lse[t] : 0;
  Number<P> mean = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (grads.weights) scratch.product[i] += grads.weights[t * count + i];
    mean += scratch.weight[i] * scratch.product[i];
  }
  for (int64_t i = 0; i < count; ++i) {
    const Number<P> ds = count == 1 ? lse_grad : scratch.weight[i] * (scratch.product[i] - mean + lse_grad);
    scratch.factors[i] = {ds, scratch.score[i], scratch.inverse[i], read.dim};
  }
}

template <class P>
inline void source_grads(
    const Read<P>& read, const std::vector<Sinks<P>>& sinks, const ReadScratch<P>& scratch, int64_t t,
    Number<P>* query_grad) {
  const int64_t count = read.count();
  for_tiles<Number<P>>(read.dim, [&](int64_t d, auto extent) {
    const auto grad = load(scratch.grad.data(), d), query = load(read.query.data(), d);
    auto query_sum = load(query_grad, d);
    for (int64_t i = 0; i < count; ++i) {
      const auto factor = scratch.factors[i];
      const auto value = load(scratch.rows[i], d, extent);
      query_sum.add(factor.query, value);
      if (!sinks[i]) continue;
      auto result = grad;
      result.scale(scratch.weight[i]);
      result.add(factor.query, query);
      result.add(factor.value, value);
      store(result, sinks[i][t], d, extent);
    }
    store(query_sum, query_grad, d);
  });
}

// One source passes its gradient on as it is; it has one through its score only if the log-sum-exp was used.
template <class P>
inline void only_source_grad(const Read<P>& read, const Sinks<P>& sink, const ReadScratch<P>& scratch, int64_t t) {
  if (!sink) return;
  for_tiles<Number<P>>(
      read.dim, [&](int64_t d, auto e) { store(load(scratch.grad.data(), d), sink[t], d, e); });
}

// The token sum holds the query's gradient, then the norm weight's.
template <class P>
void read_gradient(
    const Read<P>& read, const ReadGrads<P>& grads, const std::vector<Sinks<P>>& sinks,
    TokenSum<Number<P>>& vectors) {
  const bool plain = read.count() == 1 && grads.lse == nullptr;
  vectors.run([&](int64_t begin, int64_t end, Number<P>* sums) {
    ReadScratch<P> scratch(read, true);
    for (int64_t t = begin; t < end; ++t) {
      load_grad(read, grads, t, scratch);
      score_token(read, scratch, t, sums + read.width());
      if (plain) {
        only_source_grad(read, sinks[0], scratch, t);
      } else {
        softmax_grad(read, grads, scratch, t);
        source_grads(read, sinks, scratch, t, sums);
      }
    }
  });
}

}  // namespace attnres
