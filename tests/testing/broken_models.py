"""Models with one fault each, and the checks that have to name it."""

import torch

from testing.plain import Plain, PlainModel


class EmbeddingTwice(PlainModel):
    """The partial sum starts at the embedding, which is a source already."""

    def start(self, embedding):
        return [embedding], embedding


class NeverReset(PlainModel):
    """A finished block stays the partial sum, which goes on growing."""

    def close(self, finished, partial):
        return [*finished, partial], partial


class OneLate(PlainModel):
    def closes(self, site):
        return site > 0 and site % self.size == 0


class ZeroPartial(PlainModel):
    """A tensor of zeros where there is no partial sum yet."""

    def sources(self, finished, partial):
        return [*finished, torch.zeros_like(finished[0]) if partial is None else partial]


class LayersForSublayers(PlainModel):
    """The block size is taken to count layers of two sublayers."""

    def closes(self, site):
        return (site + 1) % (2 * self.size) == 0


class EmbeddingInFirstBlock(PlainModel):
    """The embedding is a source, and part of the first block's sum as well."""

    def close(self, finished, partial):
        return [*finished, partial + finished[0] if len(finished) == 1 else partial], None


class AverageOfBlock(PlainModel):
    def close(self, finished, partial):
        return [*finished, partial / self.size], None


class CumulativeStates(PlainModel):
    """The sources are the running residual sums, not the outputs."""

    def close(self, finished, partial):
        return [*finished, finished[-1] + partial], None


class DeltaOfBlocks(PlainModel):
    """A block is the running sum less the block before, which is no block delta from the third block on."""

    def start(self, embedding):
        self.running = torch.zeros_like(embedding)
        return super().start(embedding)

    def close(self, finished, partial):
        self.running = self.running + partial
        block = self.running if len(finished) == 1 else self.running - finished[-1]
        return [*finished, block], None


class LastOutputOnly(PlainModel):
    """A block keeps its last output in place of the sum."""

    def add(self, partial, output):
        return output


class NoOutputRead(PlainModel):
    """The final norm gets the last block."""

    def output(self, finished, partial):
        return self.sources(finished, partial)[-1]


class SumForOutput(PlainModel):
    def output(self, finished, partial):
        return torch.stack(self.sources(finished, partial)).sum(0)


class LacksOutputQuery(PlainModel):
    """The output is read with the query and key weight of the last sublayer."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.queries, self.key_weights = self.queries[:-1], self.key_weights[:-1]

    def output(self, finished, partial):
        return self.read(self.num_sublayers - 1, self.sources(finished, partial))


class TailForgotten(PlainModel):
    """The output read leaves out an unfinished last block."""

    def output(self, finished, partial):
        return super().output(finished, None)


class NormalQueries(PlainModel):
    def vector(self, dim, dtype, value):
        return (value + 0.02 * torch.randn(dim, dtype=dtype) * (value == 0)).requires_grad_()


class WeightsAtHalf(PlainModel):
    def vector(self, dim, dtype, value):
        return super().vector(dim, dtype, value / 2)


class OneWeightPerBlock(PlainModel):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.key_weights = [self.key_weights[site - site % self.size] for site in range(self.num_sublayers + 1)]


class OneQuery(PlainModel):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.queries = self.queries[:1] * (self.num_sublayers + 1)


class DetachedHistory(PlainModel):
    def close(self, finished, partial):
        return [*finished, partial.detach()], None


class DetachedForOutput(PlainModel):
    def output(self, finished, partial):
        return super().output([source.detach() for source in finished], partial)


class AddsInPlace(PlainModel):
    """The partial sum is kept in the memory of the block's first output."""

    def add(self, partial, output):
        return output if partial is None else partial.add_(output)


class OneBuffer(PlainModel):
    """Every block is summed up in the same memory, that of the finished ones included."""

    def start(self, embedding):
        self.buffer = torch.zeros_like(embedding)
        return [embedding], None

    def add(self, partial, output):
        with torch.no_grad():
            return self.buffer.copy_(output) if partial is None else self.buffer.add_(output)


class KeepsItsBank(PlainModel):
    """Sources of the pass before are still there."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.bank = []

    def start(self, embedding):
        self.bank = [*self.bank[-1:], embedding]
        return list(self.bank), None


class CrossesTokens(PlainModel):
    """The output is centred over tokens."""

    def output(self, finished, partial):
        read = super().output(finished, partial)
        return read - read.mean(-2, keepdim=True)


class AtMost12(PlainModel):
    """A bank with 12 places, whose oldest block makes room."""

    limit = 12

    def close(self, finished, partial):
        return [finished[0], *[*finished, partial][1:][-self.limit :]], None


class AtMost29(AtMost12):
    limit = 29


class OutputVectorsDetached(PlainModel):
    """The output read's query and key weight do not train."""

    def output(self, finished, partial):
        query, weight = self.queries[-1].detach(), self.key_weights[-1].detach()
        return self.adapter.read(self.sources(finished, partial), query, weight, eps=self.eps)


class OtherWithoutGradients(PlainModel):
    """A path of its own for inference, whose blocks end one sublayer late."""

    def closes(self, site):
        return (site + torch.is_grad_enabled()) % self.size == 0 and (site > 0 or torch.is_grad_enabled())


class OtherOutputWithoutGradients(PlainModel):
    def output(self, finished, partial):
        return super().output(finished, partial if torch.is_grad_enabled() else None)


class FirstSequenceOnly(PlainModel):
    """Partial sums are those of the first sequence."""

    def add(self, partial, output):
        return super().add(partial, output[:1].expand_as(output))


class SequencesFlipped(PlainModel):
    def output(self, finished, partial):
        return super().output(finished, partial).flip(0)


class BlocksIn8Bits(PlainModel):
    """In 16 bits, finished blocks are kept in fewer."""

    def close(self, finished, partial):
        kept = partial.to(torch.float8_e5m2).to(partial.dtype) if partial.element_size() == 2 else partial
        return [*finished, kept], None


class OutputOfFloat64Only(PlainModel):
    def output(self, finished, partial):
        return super().output(finished, partial) if finished[0].dtype == torch.float64 else finished[0]


def adapter(stack):
    """An adapter whose read is right, with this model."""
    return type(stack.__name__, (Plain,), {"stack": stack, "name": stack.__name__})()


SCHEDULE = {"schedule.counts", "schedule.members"}
MODELS = {
    EmbeddingTwice: {*SCHEDULE, "output.mean", "output.value", "zero_query.prenorm"},
    NeverReset: {*SCHEDULE, "output.mean", "output.value", "zero_query.prenorm"},
    OneLate: {*SCHEDULE, "output.mean", "output.value"},
    ZeroPartial: {*SCHEDULE, "output.mean", "output.value"},
    LayersForSublayers: {*SCHEDULE, "output.mean", "output.value"},
    EmbeddingInFirstBlock: {*SCHEDULE, "output.mean", "output.value", "zero_query.prenorm"},
    AverageOfBlock: {*SCHEDULE, "output.value", "zero_query.prenorm"},
    CumulativeStates: {*SCHEDULE, "output.mean", "output.value", "zero_query.prenorm"},
    DeltaOfBlocks: {*SCHEDULE, "output.value", "zero_query.prenorm"},
    LastOutputOnly: {*SCHEDULE, "output.value", "zero_query.prenorm"},
    NoOutputRead: {"output.mean", "output.value", "zero_query.prenorm"},
    SumForOutput: {"output.mean", "output.value"},
    LacksOutputQuery: {"output.query", "output.key_weight", "output.value"},
    TailForgotten: {"output.mean", "output.value", "zero_query.prenorm"},
    NormalQueries: {"init.queries"},
    WeightsAtHalf: {"init.key_weights"},
    OneWeightPerBlock: {"sites.own_key_weight"},
    OneQuery: {"sites.own_query"},
    DetachedHistory: {"backward.history", "backward.output"},
    DetachedForOutput: {"backward.output"},
    AddsInPlace: {"backward.given"},
    OneBuffer: {*SCHEDULE, "output.value", "zero_query.prenorm"},
    KeepsItsBank: {"backward.state"},
    CrossesTokens: {"locality.model", "output.mean", "output.value", "zero_query.prenorm"},
    AtMost12: {*SCHEDULE, "output.mean"},
    AtMost29: {*SCHEDULE, "output.mean"},
    OutputVectorsDetached: {"backward.output_parameters"},
    OtherWithoutGradients: {"schedule.no_gradient"},
    OtherOutputWithoutGradients: {"schedule.no_gradient"},
    FirstSequenceOnly: {"schedule.batch"},
    SequencesFlipped: {"schedule.batch"},
    BlocksIn8Bits: {"schedule.reads", "output.value"},
    OutputOfFloat64Only: {"output.value"},
}
"""Each with what has to fail among the checks that look at one thing; see `test_broken.py`."""
