"""Reads with one fault each, and the checks that have to name it."""

import torch

from testing.plain import Plain


class Scaled(Plain):
    def score(self, value, query, weight, eps):
        return super().score(value, query, weight, eps) * value.shape[-1] ** -0.5


class NormalisedValues(Plain):
    def values(self, values, eps):
        return [self.norm(value, eps) for value in values]


class NoKeyNorm(Plain):
    def norm(self, value, eps):
        return value


class NoKeyWeight(Plain):
    def score(self, value, query, weight, eps):
        return super().score(value, query, torch.ones_like(weight), eps)


class LacksKeyWeight(Plain):
    has_key_weight = False


class EpsOutsideTheRoot(Plain):
    def norm(self, value, eps):
        return value / (value.square().mean(-1, keepdim=True).sqrt() + eps)


class EpsWithTheSum(Plain):
    def norm(self, value, eps):
        return value * torch.rsqrt((value.square().sum(-1, keepdim=True) + eps) / value.shape[-1])


class EpsIgnored(Plain):
    def norm(self, value, eps):
        return super().norm(value, 1e-30)


class Sigmoid(Plain):
    def weights(self, scores):
        return scores.sigmoid()


class NoMaximum(Plain):
    def weights(self, scores):
        return scores.exp() / scores.exp().sum(-1, keepdim=True)


class MaximumOfAllTokens(Plain):
    def weights(self, scores):
        powers = (scores - scores.max()).exp()
        return powers / powers.sum(-1, keepdim=True)


class ShortSoftmax(Plain):
    """Scores and softmax in the dtype of the sources."""

    def read(self, sources, query, key_weight, *, eps):
        self.short = sources[0].dtype
        return super().read(sources, query, key_weight, eps=eps)

    def weights(self, scores):
        return scores.to(self.short).softmax(-1).to(scores.dtype)


class ShortFold(Plain):
    """Query times key weight in the dtype that they happen to have."""

    def score(self, value, query, weight, eps):
        return super().score(value, (query * weight).to(value.dtype), torch.ones_like(query, dtype=value.dtype), eps)


class ShortSquares(Plain):
    """Mean square in the dtype of the sources, at least of float16."""

    def read(self, sources, query, key_weight, *, eps):
        self.short = sources[0].dtype
        return super().read(sources, query, key_weight, eps=eps)

    def norm(self, value, eps):
        if self.short != torch.float16:
            return super().norm(value, eps)
        return value * torch.rsqrt(value.half().square().mean(-1, keepdim=True).float() + eps)


class Float32Result(Plain):
    def finish(self, mixed, sources):
        return mixed


class Promotes(Plain):
    def prepare(self, sources):
        return [source.to(torch.promote_types(source.dtype, torch.float32)) for source in sources]

    def finish(self, mixed, sources):
        widest = sources[0].dtype
        for source in sources:
            widest = torch.promote_types(widest, source.dtype)
        return mixed.to(widest)


class KeysDetached(Plain):
    """No gradient through the scores' side of a source."""

    def score(self, value, query, weight, eps):
        return super().score(value.detach(), query, weight, eps)


class WeightDetached(Plain):
    def score(self, value, query, weight, eps):
        return super().score(value, query, weight.detach(), eps)


class FirstTokensOnly(Plain):
    """The query's gradient is that of the first hundred tokens, as when a kernel forgets its last programs."""

    def score(self, value, query, weight, eps):
        flat = value.reshape(-1, value.shape[-1])
        head, tail = (
            super().score(flat[:100], query, weight, eps),
            super().score(flat[100:], query.detach(), weight, eps),
        )
        return torch.cat([head, tail]).reshape(value.shape[:-1])


class NoisyGradient(Plain):
    def read(self, sources, query, key_weight, *, eps):
        own = query * 1
        if own.requires_grad:
            own.register_hook(lambda gradient: gradient * (1 + 1e-14 * torch.randn_like(gradient)))
        return super().read(sources, own, key_weight, eps=eps)


class MissingGradient(Plain):
    def read(self, sources, query, key_weight, *, eps):
        return sources[0] if len(sources) == 1 else super().read(sources, query, key_weight, eps=eps)


class AtMost32(Plain):
    """Sources beyond a kernel's limit are left out without a word."""

    def read(self, sources, query, key_weight, *, eps):
        return super().read(sources[:32], query, key_weight, eps=eps)


class PaddedMean(Plain):
    """The mean square is over a width that is padded to a power of two."""

    def norm(self, value, eps):
        padded = 1 << (value.shape[-1] - 1).bit_length()
        return value * torch.rsqrt(value.square().sum(-1, keepdim=True) / padded + eps)


class WritesToSources(Plain):
    def prepare(self, sources):
        values = super().prepare(sources)
        with torch.no_grad():
            values[0].add_(1).sub_(1).mul_(1 + 1e-15)
        return values


class Views(Plain):
    def prepare(self, sources):
        return [source.view(-1, source.shape[-1]).view(source.shape) for source in super().prepare(sources)]


class MixesInPlace(Plain):
    """The result lies in the memory of the first source."""

    def finish(self, mixed, sources):
        if torch.is_grad_enabled() and any(source.requires_grad for source in sources):
            return super().finish(mixed, sources)
        return (
            sources[0].copy_(mixed)
            if len(sources) > 1 and sources[0].is_contiguous()
            else super().finish(mixed, sources)
        )


class ContiguousGradient(Plain):
    """Reads the gradient of the result as if it were contiguous."""

    def finish(self, mixed, sources):
        result = super().finish(mixed, sources)
        if result.requires_grad:
            result = result * 1
            result.register_hook(lambda gradient: torch.as_strided(gradient, gradient.shape, _strides(gradient.shape))
                                 if gradient.untyped_storage().nbytes() >= gradient.numel() * gradient.element_size()
                                 else gradient)  # fmt: skip
        return result


def _strides(shape):
    return torch.empty(shape, device="meta").stride()


class Strided(Plain):
    """Takes memory for contiguous, as a kernel that is given a plain pointer."""

    def prepare(self, sources):
        return [source.as_strided(source.shape, _strides(source.shape)) for source in super().prepare(sources)]


class NoisyValue(Plain):
    def finish(self, mixed, sources):
        return super().finish(mixed * (1 + 1e-14 * torch.randn_like(mixed)), sources)


class AllOrNothing(Plain):
    """A backward pass that is there only if everything wants a gradient."""

    def finish(self, mixed, sources):
        result = super().finish(mixed, sources)
        return result if all(source.requires_grad for source in sources) else result * 1.5 - result.detach() * 0.5


class NormOverTokens(Plain):
    """The mean square is over all tokens together."""

    def norm(self, value, eps):
        return value * torch.rsqrt(value.square().mean() + eps)


class EachTensorOnce(Plain):
    """A bank that knows its tensors by identity."""

    def prepare(self, sources):
        return super().prepare(list({id(source): source for source in sources}.values()))


class FlatBatch(Plain):
    def finish(self, mixed, sources):
        return super().finish(mixed, sources).reshape(-1, mixed.shape[-1])


class NoEps(Plain):
    """Without eps, a source of zeros is 0/0."""

    def norm(self, value, eps):
        return value / value.square().mean(-1, keepdim=True).sqrt()


class Clamped(Plain):
    """Sources are clamped to the range of float16 "for stability"."""

    def prepare(self, sources):
        return [source.clamp(-65504, 65504) for source in super().prepare(sources)]


class OneWeightPerBlock(Plain):
    def block_weight(self, key_weights, at):
        return key_weights[0]


class OverflowingMerge(Plain):
    def merge(self, one, other):
        left, right = one[1].exp().unsqueeze(-1), other[1].exp().unsqueeze(-1)
        return (left * one[0] + right * other[0]) / (left + right)


class DetachedPhase(Plain):
    def merge(self, one, other):
        return super().merge((one[0].detach(), one[1]), other)


class EpsBy16Bits(Plain):
    """Another eps where sources have 16 bits."""

    def read(self, sources, query, key_weight, *, eps):
        return super().read(sources, query, key_weight, eps=0.1 if sources[0].element_size() == 2 else eps)


class ScoresOf1024Channels(Plain):
    """Channels beyond the width of a kernel's tile are not scored."""

    def score(self, value, query, weight, eps):
        wide = torch.arange(len(query)) < 1024
        return super().score(value, query * wide, weight, eps)


class TokensTo1024(Plain):
    """Tokens beyond a kernel's grid are left zero."""

    def finish(self, mixed, sources):
        rows = super().finish(mixed, sources).reshape(-1, mixed.shape[-1])
        return torch.cat([rows[:1024], torch.zeros_like(rows[1024:])]).reshape(mixed.shape)


class AtMost200(Plain):
    def read(self, sources, query, key_weight, *, eps):
        return super().read(sources[:200], query, key_weight, eps=eps)


class SeveralWithoutGradient(Plain):
    def read_many(self, sources, queries, key_weights, *, eps):
        return [one.detach() for one in super().read_many(sources, queries, key_weights, eps=eps)]


class SeveralWithoutOlderGradients(Plain):
    def read_many(self, sources, queries, key_weights, *, eps):
        return super().read_many(
            [one.detach() for one in sources[:-1]] + [*sources[-1:]], queries, key_weights, eps=eps
        )


class PhasesWithoutWeightGradient(Plain):
    def two_phase(self, finished, partials, queries, key_weights, *, eps):
        return super().two_phase(finished, partials, queries, key_weights.detach(), eps=eps)


class PhasesWithoutLaterGradients(Plain):
    """Gradients reach the first finished source and the first partial sum."""

    def two_phase(self, finished, partials, queries, key_weights, *, eps):
        rest = [one.detach() for one in finished[1:]]
        later = [one if one is None or at < 2 else one.detach() for at, one in enumerate(partials)]
        return super().two_phase([finished[0], *rest], later, queries, key_weights, eps=eps)


class FirstBlockAverages(Plain):
    """With a single finished source its score is taken for granted."""

    def two_phase(self, finished, partials, queries, key_weights, *, eps):
        if len(finished) == 1:
            return [finished[0] if one is None else (finished[0] + one) / 2 for one in partials]
        return super().two_phase(finished, partials, queries, key_weights, eps=eps)


class NoPhasesIn16Bits(Plain):
    def two_phase(self, finished, partials, queries, key_weights, *, eps):
        if finished[0].element_size() == 2:
            return [finished[0] for _ in partials]
        return super().two_phase(finished, partials, queries, key_weights, eps=eps)


class SeveralIn16BitsAreTheFirst(Plain):
    def read_many(self, sources, queries, key_weights, *, eps):
        many = super().read_many(sources, queries, key_weights, eps=eps)
        return many[:1] * len(many) if sources[0].element_size() == 2 else many


READS = {
    Scaled: {"value.score_scale"},
    NormalisedValues: {"value.raw_values"},
    NoKeyNorm: {"value.key_norm", "value.eps"},
    NoKeyWeight: {"value.key_weight"},
    LacksKeyWeight: {"value.key_weight"},
    EpsOutsideTheRoot: {"value.eps"},
    EpsWithTheSum: {"value.eps"},
    EpsIgnored: {"value.eps"},
    Sigmoid: {"value.softmax", "value.score_scale", "value.eps"},
    NoMaximum: {"extremes.scores"},
    MaximumOfAllTokens: {"locality.nan", "locality.nan_gradient", "extremes.no_tokens"},
    ShortSoftmax: {"dtype.one_rounding"},
    ShortFold: {"dtype.16_bit_parameters"},
    ShortSquares: {"dtype.float16_range"},
    Float32Result: {"dtype.result"},
    Promotes: {"dtype.mixed"},
    KeysDetached: {"gradient.sources"},
    WeightDetached: {"gradient.key_weight"},
    FirstTokensOnly: {"gradient.query"},
    NoisyGradient: {"determinism.gradient"},
    MissingGradient: {"extremes.one_source_gradient"},
    AtMost32: {"extremes.many_sources"},
    PaddedMean: {"extremes.odd_widths"},
    WritesToSources: {"memory.inputs"},
    Views: {"memory.strides"},
    MixesInPlace: {"memory.result"},
    ContiguousGradient: {"memory.upstream"},
    Strided: {"memory.strides", "memory.expanded"},
    NoisyValue: {"determinism.value", "determinism.gradient", "locality.chunk_bits"},
    AllOrNothing: {"gradient.only_some"},
    NormOverTokens: {"locality.chunks", "locality.nan", "locality.nan_gradient"},
    EachTensorOnce: {"memory.same_tensor"},
    FlatBatch: {"extremes.batch_shapes"},
    NoEps: {"extremes.zero_rows", "value.eps"},
    Clamped: {"extremes.large"},
    OneWeightPerBlock: {"phases.merge", "value.several_queries"},
    OverflowingMerge: {"phases.far_apart"},
    DetachedPhase: {"phases.gradient"},
    EpsBy16Bits: {"value.eps"},
    ScoresOf1024Channels: {"extremes.wide"},
    TokensTo1024: {"extremes.many_tokens"},
    AtMost200: {"extremes.many_sources"},
    SeveralWithoutGradient: {"gradient.several_queries"},
    SeveralWithoutOlderGradients: {"gradient.several_queries"},
    PhasesWithoutWeightGradient: {"phases.gradient"},
    PhasesWithoutLaterGradients: {"phases.gradient"},
    FirstBlockAverages: {"phases.merge"},
    NoPhasesIn16Bits: {"phases.16_bit"},
    SeveralIn16BitsAreTheFirst: {"phases.16_bit"},
}
