// Phase 1: all reads of a block over the finished sources, forward and backward, each source row fetched once.
#pragma once

#include "scores.h"

namespace attnres {

// Arithmetic weighs more here than elsewhere: every read meets every source. So rows are brought into lines once, a few
// tokens at a time, and all products run on small groups of lines that stay in registers and in the nearest cache.
constexpr int64_t kTilesAtOnce = 4;
constexpr int64_t kTokensAtOnce = 4;
constexpr int64_t kScratchBytes = 1 << 20;

template <class P>
struct InterBlock {
  std::vector<Rows<P>> sources;
  Lines<Number<P>> queries;  // [reads], folded
  int64_t reads, tokens, dim;
  Number<P> eps;
  int64_t count() const { return sources.size(); }
  int64_t step() const { return pitch<Number<P>>(dim); }
  const Number<P>* query(int64_t l) const { return queries.data() + l * step(); }
};

// Adds the products of M values with N lines, over a few tiles, to running sums of vectors.
template <int N, int M, class A>
inline void add_products(
    const A* lines, const A* values, int64_t line_step, int64_t begin, int64_t end, typename Tile<A>::Vector* sums,
    int64_t step) {
  typename Tile<A>::Vector total[N][M];
#pragma GCC unroll 8
  for (int l = 0; l < N; ++l)
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) total[l][i] = sums[l * step + i];
  for (int64_t d = begin; d < end; d += Tile<A>::width) {
    Tile<A> value[M];
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) value[i] = load(values + i * line_step, d);
#pragma GCC unroll 8
    for (int l = 0; l < N; ++l) {
      const Tile<A> line = load(lines + l * line_step, d);
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) {
        total[l][i] += line.a * value[i].a;
        total[l][i] += line.b * value[i].b;
        total[l][i] += line.c * value[i].c;
        total[l][i] += line.d * value[i].d;
      }
    }
  }
#pragma GCC unroll 8
  for (int l = 0; l < N; ++l)
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) sums[l * step + i] = total[l][i];
}

// products[l, i] = <lines[l], values[i]>
template <class A>
inline void all_products(
    const A* lines, int64_t reads, const A* values, int64_t count, int64_t dim, typename Tile<A>::Vector* sums,
    A* products) {
  std::fill(sums, sums + reads * count, typename Tile<A>::Vector{});
  const int64_t stride = kTilesAtOnce * Tile<A>::width, width = padded<A>(dim), step = pitch<A>(dim);
  for (int64_t begin = 0; begin < width; begin += stride) {
    const int64_t end = std::min(begin + stride, width);
    int64_t l = 0;
    for (; l + 4 <= reads; l += 4) {
      int64_t i = 0;
      for (; i + 2 <= count; i += 2)
        add_products<4, 2>(lines + l * step, values + i * step, step, begin, end, sums + l * count + i, count);
      for (; i < count; ++i)
        add_products<4, 1>(lines + l * step, values + i * step, step, begin, end, sums + l * count + i, count);
    }
    for (; l < reads; ++l)
      for (int64_t i = 0; i < count; ++i)
        add_products<1, 1>(lines + l * step, values + i * step, step, begin, end, sums + l * count + i, count);
  }
  for (int64_t k = 0; k < reads * count; ++k) products[k] = sum_lanes(sums[k]);
}

// What one token works with, its rows brought into lines.
template <class P>
struct InterBlockToken {
  using A = Number<P>;
  Lines<A> values;                           // [sources]
  Lines<A> grads;                            // [reads]
  std::vector<A> inverse, pulls;             // [sources]
  std::vector<A> scores, weights, products;  // [reads, sources]
  std::vector<A> lse;                        // [reads]
  std::vector<typename Tile<A>::Vector> sums;
  InterBlockToken(const InterBlock<P>& block, bool backward)
      : values(block.count() * block.step()), grads(backward ? block.reads * block.step() : 0),
        inverse(block.count()), pulls(block.count()), scores(block.reads * block.count()), weights(scores.size()),
        products(scores.size()), lse(block.reads), sums(scores.size()) {}
};

// How many tokens share a walk over queries and their gradients.
template <class P>
int64_t tokens_at_once(const InterBlock<P>& block) {
  const int64_t bytes = (block.count() + block.reads) * block.step() * sizeof(Number<P>);
  return std::clamp<int64_t>(kScratchBytes / bytes, 1, kTokensAtOnce);
}

// Brings a row into a line, asking for a later one; returns its square.
template <class P>
inline Number<P> bring(Row<P> row, Row<P> next, int64_t dim, Number<P>* line) {
  Tile<Number<P>> square;
  for_tiles<Number<P>>(dim, [&](int64_t d, auto extent) {
    prefetch(next, d);
    const auto value = load(row, d, extent);
    square.add(value, value);
    store(value, line, d);
  });
  return square.sum();
}

// Scores of one token, the inverse root mean squares of its sources, and the weights of each read.
template <class P>
inline void score_block(const InterBlock<P>& block, InterBlockToken<P>& token, int64_t t) {
  const int64_t count = block.count(), step = block.step(), after = std::min(t + 1, block.tokens - 1);
  Number<P>* inverse = token.inverse.data();
  for (int64_t i = 0; i < count; ++i)
    inverse[i] = bring(block.sources[i][t], block.sources[i][after], block.dim, token.values.data() + i * step);
  for (int64_t i = 0; i < count; ++i) inverse[i] = inverse_rms(inverse[i], block.dim, block.eps);
  all_products(
      block.query(0), block.reads, token.values.data(), count, block.dim, token.sums.data(), token.scores.data());
  for (int64_t l = 0; l < block.reads; ++l)
    for (int64_t i = 0; i < count; ++i) token.scores[l * count + i] *= inverse[i];
  token.weights = token.scores;
  for (int64_t l = 0; l < block.reads; ++l) token.lse[l] = softmax(token.weights.data() + l * count, count);
}

// mixed has reads * tokens rows, those of one read after those of another.
template <class P>
void inter_block_forward(const InterBlock<P>& block, Sinks<P> mixed, Number<P>* lse) {
  const int64_t count = block.count(), reads = block.reads, tokens = block.tokens, step = block.step();
  for_tokens(tokens, (count + reads) * block.dim, [&](int64_t begin, int64_t end) {
    InterBlockToken<P> token(block, false);
    for (int64_t t = begin; t < end; ++t) {
      score_block(block, token, t);
      for (int64_t l = 0; l < reads; ++l) lse[l * tokens + t] = token.lse[l];
      for_tiles<Number<P>>(block.dim, [&](int64_t d, auto extent) {
        const Number<P>* values = token.values.data() + d;
        for (int64_t l = 0; l < reads; ++l) {
          const Number<P>* weights = token.weights.data() + l * count;
          auto total = load(values, 0);
          total.scale(weights[0]);
          for (int64_t i = 1; i < count; ++i) total.add(weights[i], load(values, i * step));
          store(total, mixed[l * tokens + t], d, extent);
        }
      });
    }
  });
}

// Gradients of the results of each read, and what has been summed up for each source so far; each may be absent.
template <class P>
struct InterBlockGrads {
  std::vector<std::optional<Rows<P>>> mixed;
  std::vector<const Number<P>*> lse;
  std::vector<std::optional<Rows<P>>> carried;
};

template <class P>
inline void load_grads(const InterBlock<P>& block, const InterBlockGrads<P>& grads, int64_t t, Number<P>* lines) {
  const int64_t after = std::min(t + 1, block.tokens - 1);
  for (int64_t l = 0; l < block.reads; ++l)  // an absent one stays zero
    if (grads.mixed[l]) bring((*grads.mixed[l])[t], (*grads.mixed[l])[after], block.dim, lines + l * block.step());
}

// Replaces each score by the factor of its query in the source's gradient, and sums up the factor of the source itself.
template <class P>
inline void block_softmax_grad(
    const InterBlock<P>& block, const InterBlockGrads<P>& grads, InterBlockToken<P>& token, int64_t t) {
  const int64_t count = block.count();
  std::fill(token.pulls.begin(), token.pulls.end(), 0);
  for (int64_t l = 0; l < block.reads; ++l) {
    const Number<P> lse_grad = grads.lse[l] ? grads.lse[l][t] : 0;
    const Number<P>*weight = token.weights.data() + l * count, *product = token.products.data() + l * count;
    Number<P>*score = token.scores.data() + l * count, mean = 0;
    for (int64_t i = 0; i < count; ++i) mean += weight[i] * product[i];
    for (int64_t i = 0; i < count; ++i) {
      const Number<P> ds = count == 1 ? lse_grad : weight[i] * (product[i] - mean + lse_grad);
      const ScoreGrad<Number<P>> factor(ds, score[i], token.inverse[i], block.dim);
      score[i] = factor.query;
      token.pulls[i] += factor.value;
    }
  }
}

// Gradients of M sources from the i-th on, one tile of them.
template <int M, class P, class E>
inline void source_grad_tiles(
    const InterBlock<P>& block, const InterBlockGrads<P>& grads, const std::vector<Sinks<P>>& sinks,
    const InterBlockToken<P>& token, int64_t t, int64_t i, int64_t d, E extent) {
  const int64_t count = block.count(), step = block.step();
  Tile<Number<P>> result[M];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
    result[m] = load(token.values.data() + (i + m) * step, d);
    result[m].scale(token.pulls[i + m]);
    if (!grads.carried[i + m]) continue;
    prefetch((*grads.carried[i + m])[std::min(t + 1, block.tokens - 1)], d);
    result[m].add(load((*grads.carried[i + m])[t], d, extent));
  }
  const Number<P>*weight = token.weights.data() + i, *factor = token.scores.data() + i;
  for (int64_t l = 0; l < block.reads; ++l) {
    const auto grad = load(token.grads.data() + l * step, d), query = load(block.query(l), d);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      result[m].add(weight[l * count + m], grad);
      result[m].add(factor[l * count + m], query);
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) store(result[m], sinks[i + m][t], d, extent);
}

// Adds one tile of the gradients of N queries from the l-th on.
template <int N, class P>
inline void query_grad_tiles(
    const InterBlock<P>& block, const std::vector<InterBlockToken<P>>& tokens, int64_t used, int64_t l, int64_t d,
    Number<P>* query_grads) {
  const int64_t count = block.count(), step = block.step();
  Tile<Number<P>> total[N];
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) total[n] = load(query_grads + (l + n) * step, d);
  for (int64_t k = 0; k < used; ++k) {
    const Number<P>*factor = tokens[k].scores.data() + l * count, *values = tokens[k].values.data();
    for (int64_t i = 0; i < count; ++i) {
      const auto value = load(values + i * step, d);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) total[n].add(factor[n * count + i], value);
    }
  }
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) store(total[n], query_grads + (l + n) * step, d);
}

// Gradients of all sources at one token.
template <class P>
inline void block_source_grads(
    const InterBlock<P>& block, const InterBlockGrads<P>& grads, const std::vector<Sinks<P>>& sinks,
    const InterBlockToken<P>& token, int64_t t) {
  for_tiles<Number<P>>(block.dim, [&](int64_t d, auto extent) {
    int64_t i = 0;
    for (; i + 2 <= block.count(); i += 2) source_grad_tiles<2>(block, grads, sinks, token, t, i, d, extent);
    for (; i < block.count(); ++i) source_grad_tiles<1>(block, grads, sinks, token, t, i, d, extent);
  });
}

// Adds what a few tokens give to the gradients of all queries.
template <class P>
inline void block_query_grads(
    const InterBlock<P>& block, const std::vector<InterBlockToken<P>>& tokens, int64_t used, Number<P>* query_grads) {
  for (int64_t d = 0; d < padded<Number<P>>(block.dim); d += Tile<Number<P>>::width) {
    int64_t l = 0;
    for (; l + 4 <= block.reads; l += 4) query_grad_tiles<4>(block, tokens, used, l, d, query_grads);
    for (; l < block.reads; ++l) query_grad_tiles<1>(block, tokens, used, l, d, query_grads);
  }
}

template <class P>
void inter_block_gradient(
    const InterBlock<P>& block, const InterBlockGrads<P>& grads, const std::vector<Sinks<P>>& sinks,
    TokenSum<Number<P>>& query_grads) {
  const int64_t at_once = tokens_at_once(block);
  query_grads.run([&](int64_t begin, int64_t end, Number<P>* sums) {
    std::vector<InterBlockToken<P>> tokens(at_once, InterBlockToken<P>(block, true));
    for (int64_t t = begin; t < end; t += at_once) {
      const int64_t used = std::min(at_once, end - t);
      for (int64_t k = 0; k < used; ++k) {
        InterBlockToken<P>& token = tokens[k];
        score_block(block, token, t + k);
        load_grads(block, grads, t + k, token.grads.data());
        all_products(
            token.grads.data(), block.reads, token.values.data(), block.count(), block.dim, token.sums.data(),
            token.products.data());
        block_softmax_grad(block, grads, token, t + k);
        block_source_grads(block, grads, sinks, token, t + k);
      }
      block_query_grads(block, tokens, used, sums);
    }
  });
}

}  // namespace attnres
