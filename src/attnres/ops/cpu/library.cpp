// The operators of attnres on CPU, registered under the schemas that attnres/ops/library.py defines.
#include <ATen/CPUFunctions.h>
#include <torch/library.h>

#include "inter_block.h"
#include "intra_block.h"
#include "read.h"

namespace attnres {
namespace {

using Tensors = std::vector<Tensor>;
using OptionalTensors = c10::List<OptionalTensor>;

bool any_of_type(at::TensorList tensors, at::ScalarType type) {
  return std::any_of(tensors.begin(), tensors.end(), [&](const Tensor& t) { return t.scalar_type() == type; });
}

// Calls f with the policy that the types ask for.
template <class F>
auto dispatch(bool wide, bool half, F&& f) {
  if (wide) return f(Double());
  return half ? f(Mixed()) : f(Single());
}

std::vector<int64_t> with_last(at::IntArrayRef sizes, int64_t last) {
  std::vector<int64_t> result(sizes.begin(), sizes.end() - 1);
  result.push_back(last);
  return result;
}

at::IntArrayRef without_last(at::IntArrayRef sizes) { return sizes.slice(0, sizes.size() - 1); }

template <class P>
Tensor working(const Tensor& like, at::IntArrayRef sizes) {
  return at::empty(sizes, like.options().dtype(kType<P>));
}

// Results like each of the tensors (of 0 elements where not needed), and the sinks that write them.
template <class P>
std::vector<Sinks<P>> sinks_of(const Tensors& results) {
  int64_t bytes = 0;
  for (const Tensor& result : results) bytes += result.nbytes();
  std::vector<Sinks<P>> sinks;
  for (const Tensor& result : results)
    sinks.push_back(result.dim() == 1 && result.numel() == 0 ? Sinks<P>() : Sinks<P>(result, bytes >= kStreamedBytes));
  return sinks;
}

template <class P>
std::optional<Rows<P>> optional_rows(const OptionalTensor& tensor) {
  return tensor ? std::optional<Rows<P>>(*tensor) : std::nullopt;
}

OptionalTensor contiguous(const OptionalTensor& tensor) {
  return tensor ? OptionalTensor(tensor->contiguous()) : std::nullopt;
}

template <class P>
const Number<P>* data_of(const OptionalTensor& tensor) {
  return tensor ? tensor->const_data_ptr<Number<P>>() : nullptr;
}

// The operators can be called by anyone, past the Python functions, so they do not trust what they are given.
void check_sizes(const char* name, const OptionalTensor& tensor, at::IntArrayRef sizes) {
  TORCH_CHECK(
      !tensor || tensor->sizes() == sizes, "attnres: ", name, " has shape ", tensor ? tensor->sizes() : sizes,
      "; allowed: ", sizes);
}

void check_sources(at::TensorList sources, const Tensor& query, int64_t query_dims, const OptionalTensor& weight) {
  TORCH_CHECK(!sources.empty(), "attnres: there are 0 sources; allowed: 1 or more");
  const Tensor& first = sources[0];
  for (const Tensor& source : sources) check_sizes("a source", source, first.sizes());
  TORCH_CHECK(
      first.dim() > 0 && query.dim() == query_dims && query.size(-1) == first.size(-1) && query.numel() > 0,
      "attnres: the query has shape ", query.sizes(), ", the sources have ", first.sizes());
  check_sizes("the key weight", weight, query.sizes());
}

template <class P>
Read<P> make_read(
    at::TensorList sources, const Tensor& query, const OptionalTensor& weight, const OptionalTensor& norm, double eps,
    double scale, double norm_eps) {
  check_sizes("the norm weight", norm, query.sizes());
  Read<P> read{rows_of<P>(sources), fold<P>(query, weight)};
  if (norm) read.norm_weight = lines<P>(*norm);
  read.tokens = count_tokens(sources[0]);
  read.dim = query.size(-1);
  read.eps = eps, read.scale = scale, read.norm_eps = norm_eps;
  return read;
}

std::tuple<Tensor, Tensor, Tensor> depth_attention(
    at::TensorList sources, const Tensor& query, const OptionalTensor& weight, const OptionalTensor& norm, double eps,
    double scale, double norm_eps, at::ScalarType dtype) {
  check_sources(sources, query, 1, weight);
  const bool half = dtype == at::kBFloat16 || any_of_type(sources, at::kBFloat16);
  return dispatch(any_of_type(sources, at::kDouble), half, [&](auto policy) {
    using P = decltype(policy);
    const Tensor& first = sources[0];
    const Tensor mixed = at::empty(first.sizes(), first.options().dtype(dtype));
    const Tensor weights = working<P>(first, with_last(first.sizes(), sources.size()));
    const Tensor lse = working<P>(first, without_last(first.sizes()));
    read_forward<P>(
        make_read<P>(sources, query, weight, norm, eps, scale, norm_eps), nullptr, sinks_of<P>({mixed})[0],
        weights.data_ptr<Number<P>>(), lse.data_ptr<Number<P>>());
    return std::make_tuple(mixed, weights, lse);
  });
}

// The source with an update in its place, and what computes it.
template <class P>
Update<P> make_update(Rows<P>& source, const Tensor& output, const Tensor& sum) {
  Update<P> update{source, Rows<P>(output), Sinks<P>(sum, false)};
  source = Rows<P>(sum);
  return update;
}

// The mix alone, for inference: fewer results to make and fewer arguments to pass, which is what counts at one token.
// With an update of the last source, the second result is the updated source.
std::pair<Tensor, Tensor> read_only(
    at::TensorList sources, const OptionalTensor& update, const Tensor& query, const OptionalTensor& weight,
    const OptionalTensor& norm, double eps, double scale, double norm_eps, std::optional<at::ScalarType> dtype) {
  check_sources(sources, query, 1, weight);
  const Tensor& first = sources[0];
  for (const Tensor& source : sources) {
    TORCH_CHECK(dtype || source.scalar_type() == first.scalar_type(), "attnres: the sources differ in dtype");
    TORCH_CHECK(source.device().is_cpu(), "attnres: a source is not on the CPU");
  }
  check_sizes("the update", update, first.sizes());
  TORCH_CHECK(!update || update->device().is_cpu(), "attnres: the update is not on the CPU");
  const at::ScalarType type = dtype.value_or(first.scalar_type());
  const bool half = type == at::kBFloat16 || any_of_type(sources, at::kBFloat16) ||
      (update && update->scalar_type() == at::kBFloat16);
  return dispatch(false, half, [&](auto policy) {
    using P = decltype(policy);
    const Tensor mixed = at::cpu::empty(first.sizes(), first.options().dtype(type));
    auto read = make_read<P>(sources, query, weight, norm, eps, scale, norm_eps);
    Tensor sum;
    std::optional<Update<P>> addition;
    if (update) {
      sum = at::cpu::empty(first.sizes(), sources.back().options());
      addition.emplace(make_update<P>(read.sources.back(), *update, sum));
    }
    read_forward<P>(read, addition ? &*addition : nullptr, sinks_of<P>({mixed})[0], nullptr, nullptr);
    return std::make_pair(mixed, sum);
  });
}

Tensor read(
    at::TensorList sources, const Tensor& query, const OptionalTensor& weight, const OptionalTensor& norm, double eps,
    double scale, double norm_eps, std::optional<at::ScalarType> dtype) {
  return read_only(sources, std::nullopt, query, weight, norm, eps, scale, norm_eps, dtype).first;
}

std::tuple<Tensor, Tensor> read_updated(
    at::TensorList sources, const Tensor& update, const Tensor& query, const OptionalTensor& weight,
    const OptionalTensor& norm, double eps, double scale, double norm_eps, std::optional<at::ScalarType> dtype) {
  return read_only(sources, update, query, weight, norm, eps, scale, norm_eps, dtype);
}

std::tuple<Tensors, Tensor, Tensor, Tensor> depth_attention_backward(
    const OptionalTensor& grad_mixed, const OptionalTensor& grad_weights, const OptionalTensor& grad_lse,
    at::TensorList sources, const Tensor& query, const OptionalTensor& weight, const OptionalTensor& norm, double eps,
    double scale, double norm_eps, const c10::List<bool>& needs) {
  check_sources(sources, query, 1, weight);
  check_sizes("the gradient", grad_mixed, sources[0].sizes());
  check_sizes("the gradient of the weights", grad_weights, with_last(sources[0].sizes(), sources.size()));
  check_sizes("the gradient of the log-sum-exp", grad_lse, without_last(sources[0].sizes()));
  TORCH_CHECK(needs.size() == sources.size(), "attnres: needs has ", needs.size(), " entries for ", sources.size());
  const bool half =
      any_of_type(sources, at::kBFloat16) || (grad_mixed && grad_mixed->scalar_type() == at::kBFloat16);
  return dispatch(any_of_type(sources, at::kDouble), half, [&](auto policy) {
    using P = decltype(policy);
    const auto read = make_read<P>(sources, query, weight, norm, eps, scale, norm_eps);
    Tensors results;
    for (size_t i = 0; i < sources.size(); ++i)
      results.push_back(at::empty(needs[i] ? sources[i].sizes() : at::IntArrayRef({0}), sources[i].options()));
    const auto mixed = optional_rows<P>(grad_mixed);
    const auto weight_grads = contiguous(grad_weights), lse_grads = contiguous(grad_lse);
    const int64_t width = padded<Number<P>>(read.dim);
    TokenSum<Number<P>> sums(read.tokens, norm ? 2 * width : width);
    read_gradient<P>(
        read, {mixed ? &*mixed : nullptr, data_of<P>(weight_grads), data_of<P>(lse_grads)}, sinks_of<P>(results), sums);
    const Number<P>* total = sums.total();
    auto [query_grad, weight_grad] = unfold<P>(total, query, weight);
    const Tensor norm_grad =
        norm ? unfold<P>(total + width, *norm, std::nullopt).first : at::empty({0}, query.options());
    return std::make_tuple(results, query_grad, weight_grad, norm_grad);
  });
}

template <class P>
InterBlock<P> make_inter_block(
    at::TensorList sources, const Tensor& queries, const OptionalTensor& weights, double eps) {
  InterBlock<P> block{rows_of<P>(sources), fold<P>(queries, weights)};
  block.reads = queries.size(0);
  block.dim = queries.size(1);
  block.tokens = count_tokens(sources[0]);
  block.eps = eps;
  return block;
}

std::tuple<Tensor, Tensor> inter_block(
    at::TensorList sources, const Tensor& queries, const OptionalTensor& weights, double eps) {
  check_sources(sources, queries, 2, weights);
  return dispatch(any_of_type(sources, at::kDouble), any_of_type(sources, at::kBFloat16), [&](auto policy) {
    using P = decltype(policy);
    std::vector<int64_t> sizes = sources[0].sizes().vec();
    sizes.insert(sizes.begin(), queries.size(0));
    const Tensor mixed = working<P>(sources[0], sizes), lse = working<P>(sources[0], without_last(sizes));
    inter_block_forward<P>(
        make_inter_block<P>(sources, queries, weights, eps), sinks_of<P>({mixed})[0], lse.data_ptr<Number<P>>());
    return std::make_tuple(mixed, lse);
  });
}

bool any_half(const OptionalTensors& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const OptionalTensor& tensor) {
    return tensor && tensor->scalar_type() == at::kBFloat16;
  });
}

std::tuple<Tensors, Tensor, Tensor> inter_block_backward(
    const OptionalTensors& grad_mixed, const OptionalTensors& grad_lse, at::TensorList sources, const Tensor& queries,
    const OptionalTensor& weights, double eps, const OptionalTensors& carried) {
  check_sources(sources, queries, 2, weights);
  const size_t reads = queries.size(0);
  TORCH_CHECK(
      grad_mixed.size() == reads && grad_lse.size() == reads && carried.size() == sources.size(), "attnres: ",
      grad_mixed.size(), " and ", grad_lse.size(), " gradients for ", reads, " reads, and ", carried.size(),
      " carried for ", sources.size(), " sources");
  for (const OptionalTensor& grad : grad_mixed) check_sizes("a gradient", grad, sources[0].sizes());
  for (const OptionalTensor& grad : grad_lse) check_sizes("a gradient", grad, without_last(sources[0].sizes()));
  for (const OptionalTensor& sum : carried) check_sizes("a carried gradient", sum, sources[0].sizes());
  const bool half = any_of_type(sources, at::kBFloat16) || any_half(grad_mixed) || any_half(carried);
  return dispatch(any_of_type(sources, at::kDouble), half, [&](auto policy) {
    using P = decltype(policy);
    const auto block = make_inter_block<P>(sources, queries, weights, eps);
    InterBlockGrads<P> grads;
    Tensors results;
    std::vector<OptionalTensor> kept;
    for (const OptionalTensor& grad : grad_mixed) grads.mixed.push_back(optional_rows<P>(grad));
    for (const OptionalTensor& grad : grad_lse) {
      kept.push_back(contiguous(grad));
      grads.lse.push_back(data_of<P>(kept.back()));
    }
    for (const OptionalTensor& sum : carried) grads.carried.push_back(optional_rows<P>(sum));
    for (const Tensor& source : sources) results.push_back(working<P>(source, source.sizes()));
    TokenSum<Number<P>> sums(block.tokens, block.reads * block.step());
    inter_block_gradient<P>(block, grads, sinks_of<P>(results), sums);
    auto [query_grad, weight_grad] = unfold<P>(sums.total(), queries, weights);
    return std::make_tuple(results, query_grad, weight_grad);
  });
}

template <class P>
IntraBlock<P> make_intra_block(
    at::TensorList near, const Tensor& like, const Tensor& query, const OptionalTensor& weight,
    const OptionalTensor& norm, double eps, double scale, double norm_eps) {
  check_sources(like, query, 1, weight);
  for (const Tensor& source : near) check_sizes("a near source", source, like.sizes());
  check_sizes("the norm weight", norm, query.sizes());
  IntraBlock<P> part{rows_of<P>(near), fold<P>(query, weight)};
  if (norm) part.norm_weight = lines<P>(*norm);
  part.tokens = count_tokens(like);
  part.dim = query.size(-1);
  part.eps = eps, part.scale = scale, part.norm_eps = norm_eps;
  return part;
}

std::tuple<Tensor, Tensor, Tensor> intra_block(
    const Tensor& mixed, const Tensor& lse, at::TensorList near, const OptionalTensor& update, const Tensor& query,
    const OptionalTensor& weight, const OptionalTensor& norm, double eps, double scale, double norm_eps,
    at::ScalarType dtype) {
  const bool half = dtype == at::kBFloat16 || mixed.scalar_type() == at::kBFloat16 ||
      any_of_type(near, at::kBFloat16) || (update && update->scalar_type() == at::kBFloat16);
  return dispatch(lse.scalar_type() == at::kDouble, half, [&](auto policy) {
    using P = decltype(policy);
    auto part = make_intra_block<P>(near, mixed, query, weight, norm, eps, scale, norm_eps);
    check_sizes("lse", lse, without_last(mixed.sizes()));
    check_sizes("the update", update, mixed.sizes());
    const Tensor out = at::empty(mixed.sizes(), mixed.options().dtype(dtype));
    const Tensor weights = working<P>(mixed, with_last(mixed.sizes(), near.size()));
    Tensor partial = at::empty({0}, mixed.options());
    std::optional<Update<P>> addition;
    if (update) {
      TORCH_CHECK(!near.empty(), "attnres: an update needs a partial sum");
      partial = at::empty(near.back().sizes(), near.back().options());
      addition.emplace(make_update<P>(part.near.back(), *update, partial));
    }
    intra_block_forward<P>(
        part, Rows<P>(mixed), lse.contiguous().template const_data_ptr<Number<P>>(), addition ? &*addition : nullptr,
        sinks_of<P>({out})[0], weights.data_ptr<Number<P>>());
    return std::make_tuple(out, weights, partial);
  });
}

std::tuple<Tensor, Tensor, Tensors, Tensor, Tensor> intra_block_backward(
    const Tensor& grad, const Tensor& out, at::TensorList near, const Tensor& near_weights, const Tensor& query,
    const OptionalTensor& weight, double eps, double scale, at::ScalarType mixed_dtype) {
  const bool half = mixed_dtype == at::kBFloat16 || grad.scalar_type() == at::kBFloat16 ||
      out.scalar_type() == at::kBFloat16 || any_of_type(near, at::kBFloat16);
  return dispatch(near_weights.scalar_type() == at::kDouble, half, [&](auto policy) {
    using P = decltype(policy);
    const auto part = make_intra_block<P>(near, grad, query, weight, std::nullopt, eps, scale, 0);
    check_sizes("the output", out, grad.sizes());
    check_sizes("the weights", near_weights, with_last(grad.sizes(), near.size()));
    const Tensor grad_lse = working<P>(grad, without_last(grad.sizes())), weights = near_weights.contiguous();
    Tensors results{at::empty(grad.sizes(), grad.options().dtype(mixed_dtype))};
    for (const Tensor& source : near) results.push_back(at::empty(source.sizes(), source.options()));
    auto sinks = sinks_of<P>(results);
    TokenSum<Number<P>> sums(part.tokens, padded<Number<P>>(part.dim));
    intra_block_gradient<P>(
        part, Rows<P>(grad), Rows<P>(out), weights.template const_data_ptr<Number<P>>(),
        {sinks[0], grad_lse.data_ptr<Number<P>>(), {sinks.begin() + 1, sinks.end()}}, sums);
    auto [query_grad, weight_grad] = unfold<P>(sums.total(), query, weight);
    return std::make_tuple(
        results[0], grad_lse, Tensors(results.begin() + 1, results.end()), query_grad, weight_grad);
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(attnres, CPU, library) {
  library.impl("read", read);
  library.impl("read_updated", read_updated);
  library.impl("depth_attention", depth_attention);
  library.impl("depth_attention_backward", depth_attention_backward);
  library.impl("inter_block", inter_block);
  library.impl("inter_block_backward", inter_block_backward);
  library.impl("intra_block", intra_block);
  library.impl("intra_block_backward", intra_block_backward);
}

}  // namespace attnres
