// Scores and softmax of one token, and the gradient of a score.
#pragma once

#include <bit>
#include <cmath>
#include <limits>

#include "rows.h"

namespace attnres {

// Sums over one row: its square, and its products with one or two lines.
template <class A>
struct Sums {
  A square, query, grad;
};

template <bool WithGrad, class P>
inline Sums<Number<P>> row_sums(
    Row<P> row, Row<P> next, const Number<P>* query, const Number<P>* grad, int64_t dim) {
  Tile<Number<P>> square, by_query, by_grad;
  for_tiles<Number<P>>(dim, [&](int64_t d, auto extent) {
    prefetch(next, d);
    const auto value = load(row, d, extent);
    square.add(value, value);
    by_query.add(value, load(query, d));
    if constexpr (WithGrad) by_grad.add(value, load(grad, d));
  });
  return {square.sum(), by_query.sum(), WithGrad ? by_grad.sum() : 0};
}

template <class A>
inline A inverse_rms(A square, int64_t dim, A eps) {
  return 1 / std::sqrt(square / dim + eps);
}

inline double exponential(double x) { return std::exp(x); }

// exp(x) for x <= 0, to about one unit in the last place, in a form that the compiler can run on a vector: 2^k times a
// polynomial on [-ln 2 / 2, ln 2 / 2].
inline float exponential(float x) {
  constexpr float round = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  const float shifted = x * 1.44269504f + round;
  const float k = shifted - round;
  const float r = (x - k * 0.693359375f) + k * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const float mantissa = p * r * r + r + 1;
  const uint32_t exponent = (std::bit_cast<uint32_t>(shifted) - 0x4b400000u + 127u) << 23;
  return x < -87.0f ? 0.0f : mantissa * std::bit_cast<float>(exponent);
}

// Turns scores into weights, in place, and returns their log-sum-exp. One score has weight 1, whatever it is.
template <class A>
inline A softmax(A* scores, int64_t count) {
  if (count == 1) {
    const A lse = scores[0];
    scores[0] = 1;
    return lse;
  }
  A largest = -std::numeric_limits<A>::infinity(), total = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, scores[i]);
  for (int64_t i = 0; i < count; ++i) scores[i] = exponential(scores[i] - largest);
  for (int64_t i = 0; i < count; ++i) total += scores[i];
  const A factor = 1 / total;
  for (int64_t i = 0; i < count; ++i) scores[i] *= factor;
  return largest + std::log(total);
}

// The gradient of a score s = r <v, u> with respect to v is r u - r^2 s / D v: factors of u and of v for a given ds.
template <class A>
struct ScoreGrad {
  A query, value;
  ScoreGrad() = default;
  ScoreGrad(A ds, A score, A inverse_rms, int64_t dim)
      : query(ds * inverse_rms), value(ds == 0 ? 0 : -ds * score * inverse_rms * inverse_rms / dim) {}
};

// The RMSNorm that follows a read, rounded where Transformers rounds it: the read, the normalised value and its product
// with the weight are each of the result's type.
template <class P>
class FollowingNorm {
 public:
  FollowingNorm(Number<P>* line, Sink<P> result) : line_(line), result_(result) {}

  void take(Tile<Number<P>> read, int64_t d) {
    round_as<P>(read, result_.half);
    square_.add(read, read);
    store(read, line_, d);
  }
  void finish(const Number<P>* weight, int64_t dim, Number<P> eps) const {
    const Number<P> inverse = inverse_rms(square_.sum(), dim, eps);
    for_tiles<Number<P>>(dim, [&](int64_t d, auto extent) {
      auto value = load(line_, d);
      value.scale(inverse);
      round_as<P>(value, result_.half);
      value.multiply(load(weight, d));
      store(value, result_, d, extent);
    });
  }

 private:
  Number<P>* line_;
  Sink<P> result_;
  Tile<Number<P>> square_;
};

// An output that is added to a source before the source is read.
template <class P>
struct Update {
  Rows<P> source, output;
  Sinks<P> sum;

  void run(int64_t t, int64_t dim) const {
    for_tiles<Number<P>>(dim, [&](int64_t d, auto extent) {
      auto total = load(source[t], d, extent);
      total.add(load(output[t], d, extent));
      store(total, sum[t], d, extent);
    });
  }
};

}  // namespace attnres
