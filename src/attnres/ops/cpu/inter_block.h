// Phase 1: all reads of a block over the finished sources, forward and backward, each source row fetched once.
#pragma once

#include "scores.h"

namespace attnres {

constexpr int64_t kReadsAtOnce = 4;

template <class P>
struct InterBlock {
  std::vector<Rows<P>> sources;
  std::vector<Number<P>> queries;  // [reads] lines, folded
  int64_t reads, tokens, dim;
  Number<P> eps;
  int64_t count() const { return sources.size(); }
  int64_t width() const { return padded<Number<P>>(dim); }
  const Number<P>* query(int64_t l) const { return queries.data() + l * width(); }
};

// Products of one row with N lines.
template <int N, class P>
inline void row_products(
    Row<P> row, const Number<P>* lines, int64_t width, int64_t dim, Number<P>* products, int64_t step) {
  typename Tile<Number<P>>::Vector totals[N][2] = {};
  for_tiles<Number<P>>(dim, [&](int64_t d, auto extent) {
    const auto value = load(row, d, extent);
    for (int l = 0; l < N; ++l) {
      const auto line = load(lines + l * width, d);
      totals[l][0] += value.a * line.a;
      totals[l][1] += value.b * line.b;
      totals[l][0] += value.c * line.c;
      totals[l][1] += value.d * line.d;
    }
  });
  for (int l = 0; l < N; ++l) products[l * step] = sum_lanes(totals[l][0] + totals[l][1]);
}

// Products of one row with `count` lines, each into a place `step` further.
template <class P>
inline void all_products(
    Row<P> row, const Number<P>* lines, int64_t count, int64_t dim, Number<P>* products, int64_t step) {
  const int64_t width = padded<Number<P>>(dim);
  int64_t l = 0;
  for (; l + kReadsAtOnce <= count; l += kReadsAtOnce)
    row_products<kReadsAtOnce>(row, lines + l * width, width, dim, products + l * step, step);
  for (; l < count; ++l) row_products<1>(row, lines + l * width, width, dim, products + l * step, step);
}

// What one token works with.
template <class P>
struct InterBlockScratch {
  std::vector<Row<P>> rows;                          // [sources]
  std::vector<Number<P>> inverse, pulls;             // [sources]
  std::vector<Number<P>> scores, weights, products;  // [reads, sources]
  std::vector<Number<P>> grads;                      // [reads] lines
  InterBlockScratch(const InterBlock<P>& block, bool backward)
      : rows(block.count()), inverse(block.count()), pulls(block.count()), scores(block.reads * block.count()),
        weights(scores.size()), products(scores.size()), grads(backward ? block.reads * block.width() : 0) {}
};

// Scores of one token, the inverse root mean squares of its sources, and the weights of each read.
template <class P>
inline void score_block(const InterBlock<P>& block, InterBlockScratch<P>& scratch, int64_t t, Number<P>* lse) {
  const int64_t count = block.count(), after = std::min(t + 1, block.tokens - 1);
  Number<P>*scores = scratch.scores.data(), *inverse = scratch.inverse.data();
  for (int64_t i = 0; i < count; ++i) {
    const Row<P> row = scratch.rows[i] = block.sources[i][t];
    inverse[i] = row_sums<false, P>(row, block.sources[i][after], block.query(0), nullptr, block.dim).square;
    all_products(row, block.queries.data(), block.reads, block.dim, scores + i, count);
  }
  for (int64_t i = 0; i < count; ++i) inverse[i] = inverse_rms(inverse[i], block.dim, block.eps);
  for (int64_t l = 0; l < block.reads; ++l)
    for (int64_t i = 0; i < count; ++i) scores[l * count + i] *= inverse[i];
  scratch.weights = scratch.scores;
  for (int64_t l = 0; l < block.reads; ++l) lse[l] = softmax(scratch.weights.data() + l * count, count);
}

// mixed has reads * tokens rows, those of one read after those of another.
template <class P>
void inter_block_forward(const InterBlock<P>& block, Sinks<P> mixed, Number<P>* lse) {
  const int64_t count = block.count(), reads = block.reads, tokens = block.tokens;
  for_tokens(tokens, (count + reads) * block.dim, [&](int64_t begin, int64_t end) {
    InterBlockScratch<P> scratch(block, false);
    std::vector<Number<P>> token_lse(reads);
    for (int64_t t = begin; t < end; ++t) {
      score_block(block, scratch, t, token_lse.data());
      for (int64_t l = 0; l < reads; ++l) lse[l * tokens + t] = token_lse[l];
      for_tiles<Number<P>>(block.dim, [&](int64_t d, auto extent) {
        for (int64_t l = 0; l < reads; ++l) {
          const Number<P>* weights = scratch.weights.data() + l * count;
          auto total = load(scratch.rows[0], d, extent);
          total.scale(weights[0]);
          for (int64_t i = 1; i < count; ++i) total.add(weights[i], load(scratch.rows[i], d, extent));
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
  for (int64_t l = 0; l < block.reads; ++l) {
    if (!grads.mixed[l]) continue;  // stays zero
    const Row<P> row = (*grads.mixed[l])[t], next = (*grads.mixed[l])[after];
    for_tiles<Number<P>>(block.dim, [&](int64_t d, auto extent) {
      prefetch(next, d);
      store(load(row, d, extent), lines + l * block.width(), d);
    });
  }
}

// Replaces each score by the factor of its query in the source's gradient, and sums up the factor of the source itself.
template <class P>
inline void block_softmax_grad(
    const InterBlock<P>& block, const InterBlockGrads<P>& grads, InterBlockScratch<P>& scratch, int64_t t) {
  const int64_t count = block.count();
  std::fill(scratch.pulls.begin(), scratch.pulls.end(), 0);
  for (int64_t l = 0; l < block.reads; ++l) {
    const Number<P> lse_grad = grads.lse[l] ? grads.lse[l][t] : 0;
    const Number<P>*weight = scratch.weights.data() + l * count, *product = scratch.products.data() + l * count;
    Number<P>*score = scratch.scores.data() + l * count, mean = 0;
    for (int64_t i = 0; i < count; ++i) mean += weight[i] * product[i];
    for (int64_t i = 0; i < count; ++i) {
      const Number<P> ds = count == 1 ? lse_grad : weight[i] * (product[i] - mean + lse_grad);
      const ScoreGrad<Number<P>> factor(ds, score[i], scratch.inverse[i], block.dim);
      score[i] = factor.query;
      scratch.pulls[i] += factor.value;
    }
  }
}

template <class P>
inline void block_source_grads(
    const InterBlock<P>& block, const InterBlockGrads<P>& grads, const std::vector<Sinks<P>>& sinks,
    const InterBlockScratch<P>& scratch, int64_t t, Number<P>* query_grads) {
  const int64_t count = block.count(), width = block.width();
  for_tiles<Number<P>>(block.dim, [&](int64_t d, auto extent) {
    for (int64_t i = 0; i < count; ++i) {
      auto result = load(scratch.rows[i], d, extent);
      result.scale(scratch.pulls[i]);
      if (grads.carried[i]) result.add(load((*grads.carried[i])[t], d, extent));
      for (int64_t l = 0; l < block.reads; ++l) {
        result.add(scratch.weights[l * count + i], load(scratch.grads.data() + l * width, d));
        result.add(scratch.scores[l * count + i], load(block.query(l), d));
      }
      store(result, sinks[i][t], d, extent);
    }
    for (int64_t l = 0; l < block.reads; ++l) {
      auto total = load(query_grads + l * width, d);
      for (int64_t i = 0; i < count; ++i)
        total.add(scratch.scores[l * count + i], load(scratch.rows[i], d, extent));
      store(total, query_grads + l * width, d);
    }
  });
}

template <class P>
void inter_block_gradient(
    const InterBlock<P>& block, const InterBlockGrads<P>& grads, const std::vector<Sinks<P>>& sinks,
    TokenSum<Number<P>>& query_grads) {
  query_grads.run([&](int64_t begin, int64_t end, Number<P>* sums) {
    InterBlockScratch<P> scratch(block, true);
    std::vector<Number<P>> lse(block.reads);
    for (int64_t t = begin; t < end; ++t) {
      load_grads(block, grads, t, scratch.grads.data());
      score_block(block, scratch, t, lse.data());
      for (int64_t i = 0; i < block.count(); ++i)
        all_products(
            scratch.rows[i], scratch.grads.data(), block.reads, block.dim, scratch.products.data() + i, block.count());
      block_softmax_grad(block, grads, scratch, t);
      block_source_grads(block, grads, sinks, scratch, t, sums);
    }
  });
}

}  // namespace attnres
