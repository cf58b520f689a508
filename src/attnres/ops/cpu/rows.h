// Tensors seen as rows, and how rows are shared out among torch's threads.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "layout.h"

namespace attnres {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Results of one call that together are larger than this go past the cache.
constexpr int64_t kStreamedBytes = 32 << 20;

template <class P>
constexpr at::ScalarType kType = c10::CppTypeToScalarType<Number<P>>::value;

inline int64_t count_tokens(const Tensor& tensor) {
  int64_t tokens = 1;
  for (int64_t size : tensor.sizes().slice(0, tensor.dim() - 1)) tokens *= size;
  return tokens;
}

// The one stride that leads from each row to the next, if there is one.
inline std::optional<int64_t> row_stride(const Tensor& tensor) {
  if (tensor.stride(-1) != 1 && tensor.size(-1) > 1) return std::nullopt;
  std::optional<int64_t> stride;
  int64_t expected = 0;
  for (int64_t i = tensor.dim() - 2; i >= 0; --i) {
    if (tensor.size(i) == 1) continue;
    if (!stride) {
      stride = tensor.stride(i);
    } else if (tensor.stride(i) != expected) {
      return std::nullopt;
    }
    expected = tensor.stride(i) * tensor.size(i);
  }
  return stride.value_or(0);
}

// A tensor [*batch, dim] as rows. Whatever does not lie in rows at one stride is copied.
template <class P>
struct Rows {
  Tensor tensor;
  const char* base;
  int64_t stride;  // bytes
  bool half;

  explicit Rows(const Tensor& given) : tensor(given) {
    half = tensor.scalar_type() == at::kBFloat16;
    TORCH_CHECK(
        half ? P::split : tensor.scalar_type() == kType<P>, "attnres: the CPU kernel got a tensor of ",
        tensor.scalar_type(), "; allowed are float32 and bfloat16, or float64 alone");
    auto step = row_stride(tensor);
    if (!step) {
      tensor = tensor.contiguous();
      step = row_stride(tensor);
    }
    base = static_cast<const char*>(tensor.const_data_ptr());
    stride = *step * tensor.element_size();
  }
  Row<P> operator[](int64_t t) const { return {base + t * stride, half}; }
};

// A contiguous result [*batch, dim], or none.
template <class P>
struct Sinks {
  char* base = nullptr;
  int64_t stride = 0;
  bool half = false, streamed = false;

  Sinks() = default;
  Sinks(const Tensor& tensor, bool large) {
    base = static_cast<char*>(tensor.data_ptr());
    half = tensor.scalar_type() == at::kBFloat16;
    TORCH_CHECK(
        half ? P::split : tensor.scalar_type() == kType<P>, "attnres: the CPU kernel was asked for a result of ",
        tensor.scalar_type(), "; allowed are float32 and bfloat16, or float64 alone");
    stride = tensor.size(-1) * tensor.element_size();
    streamed = large && reinterpret_cast<uintptr_t>(base) % kVectorBytes == 0 && stride % kVectorBytes == 0;
  }
  explicit operator bool() const { return base != nullptr; }
  Sink<P> operator[](int64_t t) const { return {base + t * stride, half, streamed}; }
};

template <class P>
std::vector<Rows<P>> rows_of(at::TensorList tensors) {
  std::vector<Rows<P>> rows;
  rows.reserve(tensors.size());
  for (const Tensor& tensor : tensors) rows.emplace_back(tensor);
  return rows;
}

// The rows of a small tensor [..., dim] as lines of the kernel's own, one after another.
template <class P>
Lines<Number<P>> lines(const Tensor& tensor) {
  const Tensor cast = (tensor.scalar_type() == kType<P> ? tensor : tensor.to(kType<P>)).contiguous();
  const int64_t dim = cast.size(-1), step = pitch<Number<P>>(dim), count = count_tokens(cast);
  Lines<Number<P>> result(count * step);
  for (int64_t line = 0; line < count; ++line) {
    const Row<P> row{reinterpret_cast<const char*>(cast.template const_data_ptr<Number<P>>() + line * dim), false};
    for_tiles<Number<P>>(dim, [&](int64_t d, auto e) { store(load(row, d, e), result.data() + line * step, d); });
  }
  return result;
}

// The way back, to a tensor of the same shape as `like`.
template <class P>
Tensor tensor_of(const Number<P>* lines, const Tensor& like) {
  Tensor result = at::empty(like.sizes(), like.options().dtype(kType<P>));
  const int64_t dim = like.size(-1), step = pitch<Number<P>>(dim);
  for (int64_t line = 0; line < count_tokens(like); ++line) {
    const Sink<P> sink{reinterpret_cast<char*>(result.template data_ptr<Number<P>>() + line * dim), false, false};
    for_tiles<Number<P>>(dim, [&](int64_t d, auto e) { store(load(lines + line * step, d), sink, d, e); });
  }
  return result;
}

// pseudo_query * key_weight
template <class P>
Lines<Number<P>> fold(const Tensor& query, const OptionalTensor& weight) {
  Lines<Number<P>> folded = lines<P>(query);
  if (weight) {
    const Lines<Number<P>> scale = lines<P>(*weight);
    for (size_t d = 0; d < folded.size(); ++d) folded[d] *= scale[d];
  }
  return folded;
}

// From the gradient of the folded query: to the query (times the key weight) and to the key weight (times the query).
template <class P>
std::pair<Tensor, Tensor> unfold(const Number<P>* grad, const Tensor& query, const OptionalTensor& weight) {
  const Tensor folded = tensor_of<P>(grad, query);
  if (!weight) return {folded.to(query.scalar_type()), at::empty({0}, query.options())};
  return {
      (folded * weight->to(kType<P>)).to(query.scalar_type()),
      (folded * query.to(kType<P>)).to(weight->scalar_type())};
}

// Runs f(begin, end) on ranges of tokens, on torch's threads.
template <class F>
inline void for_tokens(int64_t tokens, int64_t elements_per_token, F&& f) {
  const int64_t grain = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, elements_per_token));
  at::parallel_for(0, tokens, grain, [&](int64_t begin, int64_t end) {
    f(begin, end);
    finish_streams();
  });
}

// A sum over tokens in two stages: pieces of tokens each into a line of their own, then the lines in order. The pieces
// depend on the number of tokens alone, so the result does not depend on the number of threads.
template <class A>
class TokenSum {
 public:
  TokenSum(int64_t tokens, int64_t width)
      : tokens_(tokens), width_(width), pieces_(std::clamp<int64_t>(tokens / 64, 1, 64)), sums_(pieces_ * width) {}

  template <class F>
  void run(F&& f) {
    at::parallel_for(0, pieces_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t piece = begin; piece < end; ++piece)
        f(tokens_ * piece / pieces_, tokens_ * (piece + 1) / pieces_, sums_.data() + piece * width_);
      finish_streams();
    });
  }
  const A* total() {
    at::parallel_for(0, width_, 4096, [&](int64_t begin, int64_t end) {
      for (int64_t piece = 1; piece < pieces_; ++piece) {
        const A* line = sums_.data() + piece * width_;
        for (int64_t d = begin; d < end; ++d) sums_[d] += line[d];
      }
    });
    return sums_.data();
  }

 private:
  int64_t tokens_, width_, pieces_;
  Lines<A> sums_;
};

}  // namespace attnres
