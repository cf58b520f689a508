"""``attnres bench``: how fast reads, chains of reads and whole models are, and how much memory they need."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from attnres.cli.parsing import parse
from attnres.errors import ConfigError

DType = Literal["float32", "bfloat16"]
Device = Literal["auto", "cpu", "cuda"]
_RESERVE_BYTES = 2**31


def main(arguments: Sequence[str]) -> None:
    """Run the command."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(_overview())
        return
    if not arguments or arguments[0] not in _BENCHMARKS:
        seen = repr(arguments[0]) if arguments else "missing"
        raise ConfigError(f"benchmark is {seen}; allowed: {', '.join(_BENCHMARKS)}")
    name, *rest = arguments
    make, _ = _BENCHMARKS[name]
    parse(make("--quick" in rest), rest, command=f"bench {name}")


def _op(small: bool) -> Callable[..., None]:
    def op(
        *,
        shapes: tuple[str, ...] = ("5x48x64",) if small else ("9x4096x1024", "17x4096x1024", "9x2048x512"),
        dtypes: tuple[DType, ...] = ("float32", "bfloat16"),
        compile: bool = not small,
        rounds: int = 3 if small else 21,
        budget_s: float = 5.0,
        token_reads: int = 20 if small else 2000,
        keep_memory: bool = not small,
        device: Device = "auto",
        csv: Path | None = None,
        quick: bool = small,
    ) -> None:
        """Time one read, forward and backward, as a multiple of its memory floor; ours, and other people's.

        Takes about ten minutes on two cores, a third of them compiling. Run it on an idle machine.

        Args:
            shapes: Reads to time, each SOURCESxTOKENSxDIM.
            dtypes: Of the sources.
            compile: Also time the forms in plain PyTorch under torch.compile.
            rounds: Timed rounds; each visits every form.
            budget_s: Seconds per form and direction, after which a slow form sits out; it gets three rounds at least.
            token_reads: Reads of a single token per form, for its latency; 0 for none.
            keep_memory: On a CPU, keep freed memory in the process, so that times are not those of page faults.
            device: Where to run; auto is a GPU where there is one.
            csv: File to append the rows to.
            quick: Small sizes, to see that it runs.
        """
        import torch

        from attnres.bench.inputs import Shape
        from attnres.bench.machine import device_of
        from attnres.bench.op import OpBench, OpRow, measure

        bench = OpBench(
            shapes=tuple(map(Shape.parse, shapes)),
            dtypes=tuple(getattr(torch, dtype) for dtype in dtypes),
            device=device_of(device),
            compiled=compile,
            rounds=rounds,
            budget_s=budget_s,
            token_reads=token_reads,
        )
        rows, machine = _collect(measure(bench), OpRow, bench.device, csv, keep=keep_memory)
        _show("one read", rows, machine, by=("sources", "tokens", "dim", "dtype"))

    return op


def _phases(small: bool) -> Callable[..., None]:
    def phases(
        *,
        sublayers: tuple[int, ...] = (8, 16) if small else (16, 32, 64, 128),
        blocks: int = 4 if small else 8,
        tokens: int = 8 if small else 4096,
        dim: int = 32 if small else 1024,
        dtype: DType = "float32",
        rounds: int = 3 if small else 5,
        keep_memory: bool = not small,
        device: Device = "auto",
        csv: Path | None = None,
        figure: Path | None = None,
        quick: bool = small,
    ) -> None:
        """Time all reads of a model together, without its sublayers: one phase, two phases, and plain sums.

        Takes about four minutes on two cores. Run it on an idle machine.

        Args:
            sublayers: Depths.
            blocks: Blocks at every depth.
            tokens: Tokens T.
            dim: Width D.
            dtype: Of embedding and sublayer outputs.
            rounds: Timed rounds; each visits every arm, and slow arms sit out the last of them.
            keep_memory: On a CPU, keep freed memory in the process, so that times are not those of page faults.
            device: Where to run; auto is a GPU where there is one.
            csv: File to append the rows to.
            figure: SVG of cost over depth to write.
            quick: Small sizes, to see that it runs.
        """
        import tempfile

        import torch

        from attnres.bench.figure import draw_depth
        from attnres.bench.machine import device_of
        from attnres.bench.phases import PhaseBench, PhaseRow, measure

        bench = PhaseBench(
            sublayers=sublayers,
            blocks=blocks,
            tokens=tokens,
            dim=dim,
            dtype=getattr(torch, dtype),
            device=device_of(device),
            rounds=rounds,
        )
        if figure is not None:  # refused now rather than after measuring
            figure.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=figure.parent).close()
        rows, machine = _collect(measure(bench), PhaseRow, bench.device, csv, keep=keep_memory)
        _show("all reads of a model", rows, machine, by=("sublayers",))
        if figure is not None:
            draw_depth(rows, machine, figure)

    return phases


def _overhead(small: bool) -> Callable[..., None]:
    def overhead(
        *,
        layers: int = 2 if small else 16,
        dim: int = 64 if small else 1024,
        vocab: int = 64 if small else 2048,
        blocks: int = 4 if small else 8,
        batch: int = 2,
        context: int = 16 if small else 512,
        prompt: int = 16 if small else 2048,
        cached: int = 8 if small else 128,
        precisions: tuple[DType, ...] = ("float32", "bfloat16"),
        optimizer: bool = False,
        compile: bool = False,
        rounds: int = 2 if small else 6,
        decode_rounds: int = 3 if small else 40,
        keep_memory: bool = not small,
        device: Device = "auto",
        csv: Path | None = None,
        quick: bool = small,
    ) -> None:
        """Time a whole Llama-shaped model under each residual strategy: training step, prefill, decoding.

        Takes about eight minutes on two cores and 6 GiB. Run it on an idle machine.

        Args:
            layers: Decoder layers.
            dim: Width D.
            vocab: Size of the vocabulary; small, so that the head does not hide what differs.
            blocks: Blocks of Block AttnRes.
            batch: Sequences of a training step.
            context: Tokens per sequence of a training step.
            prompt: Tokens of the prefill.
            cached: Tokens in the cache when decoding starts.
            precisions: Of training (bfloat16 is autocast over float32 weights) and inference (bfloat16 weights).
            optimizer: Let the training step include AdamW.
            compile: Time the models under torch.compile; decoding is left out then.
            rounds: Timed rounds of training and prefill; each visits every arm.
            decode_rounds: Timed rounds of decoding, one token each.
            keep_memory: On a CPU, keep freed memory in the process, so that times are not those of page faults.
            device: Where to run; auto is a GPU where there is one.
            csv: File to append the rows to.
            quick: Small sizes, to see that it runs.
        """
        from attnres.bench.machine import device_of
        from attnres.bench.models import ModelShape
        from attnres.bench.overhead import OverheadBench, OverheadRow, measure

        bench = OverheadBench(
            shape=ModelShape(layers=layers, dim=dim, vocab=vocab, blocks=blocks),
            batch=batch,
            context=context,
            prompt=prompt,
            cached=cached,
            precisions=precisions,
            device=device_of(device),
            compiled=compile,
            optimizer=optimizer,
            rounds=rounds,
            decode_rounds=decode_rounds,
        )
        rows, machine = _collect(measure(bench), OverheadRow, bench.device, csv, keep=keep_memory)
        _show("whole model", rows, machine, by=("task", "precision"))

    return overhead


def _memory(small: bool) -> Callable[..., None]:
    def memory(
        *,
        read: str = "5x48x64" if small else "9x2048x1024",
        dtypes: tuple[DType, ...] = ("float32", "bfloat16"),
        layers: tuple[int, ...] = (4,) if small else (8, 16, 32),
        dim: int = 32 if small else 128,
        blocks: int = 4 if small else 8,
        batch: int = 1 if small else 4,
        context: int = 32 if small else 1024,
        device: Device = "auto",
        csv: Path | None = None,
        quick: bool = small,
    ) -> None:
        """Measure what one read keeps for its backward, and the peak memory of a training step over PreNorm.

        Exact on a CPU too, and not distorted by other work. Takes about two minutes on two cores.

        Args:
            read: The read, SOURCESxTOKENSxDIM.
            dtypes: Of the read's sources.
            layers: Depths of the model.
            dim: Width of the model; small against its tokens, so that activations are what counts.
            blocks: Blocks of Block AttnRes.
            batch: Sequences of a training step.
            context: Tokens per sequence.
            device: Where to run; auto is a GPU where there is one.
            csv: File to append the rows to.
            quick: Small sizes, to see that it runs.
        """
        import torch

        from attnres.bench.inputs import Shape
        from attnres.bench.machine import device_of
        from attnres.bench.memory import MemoryBench, MemoryRow, measure

        bench = MemoryBench(
            read=Shape.parse(read),
            dtypes=tuple(getattr(torch, dtype) for dtype in dtypes),
            layers=layers,
            dim=dim,
            blocks=blocks,
            batch=batch,
            context=context,
            device=device_of(device),
        )
        rows, machine = _collect(measure(bench), MemoryRow, bench.device, csv)
        _show("memory", rows, machine, by=("measure", "dtype", "checkpointing"))

    return memory


def _inference(small: bool) -> Callable[..., None]:
    def inference(
        *,
        layers: int = 2 if small else 16,
        dim: int = 64 if small else 1024,
        vocab: int = 64 if small else 2048,
        blocks: int = 4 if small else 8,
        prompt: int = 24 if small else 2048,
        chunks: tuple[int, ...] = (1, 7) if small else (1, 7, 16, 1000),
        most_chunks: int = 4 if small else 32,
        cached: int = 8 if small else 128,
        precisions: tuple[DType, ...] = ("float32", "bfloat16"),
        compile: bool = not small,
        rounds: int = 2 if small else 6,
        decode_rounds: int = 3 if small else 40,
        keep_memory: bool = not small,
        device: Device = "auto",
        csv: Path | None = None,
        quick: bool = small,
    ) -> None:
        """Time the first and the next token of a whole model, and measure its bank, against the plain model.

        Takes about twenty minutes on two cores and 6 GiB, half of them compiling. Run it on an idle machine.

        Args:
            layers: Decoder layers.
            dim: Width D.
            vocab: Size of the vocabulary; small, so that the head does not hide what differs.
            blocks: Blocks of Block AttnRes.
            prompt: Tokens of the prompt.
            chunks: Tokens per forward of a chunked prompt, beside the whole prompt in one.
            most_chunks: Forwards of a chunked prompt; short chunks make a shorter prompt.
            cached: Tokens in the cache at the first step of the next token.
            precisions: Of the weights.
            compile: Also time the next token under torch.compile, with a cache of fixed size.
            rounds: Timed rounds of the first token; each visits every arm.
            decode_rounds: Timed rounds of the next token.
            keep_memory: On a CPU, keep freed memory in the process, so that times are not those of page faults.
            device: Where to run; auto is a GPU where there is one.
            csv: File to append the rows to.
            quick: Small sizes, to see that it runs.
        """
        from attnres.bench.inference import InferenceBench, InferenceRow, measure
        from attnres.bench.machine import device_of
        from attnres.bench.models import ModelShape

        bench = InferenceBench(
            shape=ModelShape(layers=layers, dim=dim, vocab=vocab, blocks=blocks),
            prompt=prompt,
            chunks=chunks,
            most_chunks=most_chunks,
            cached=cached,
            precisions=precisions,
            device=device_of(device),
            compiled=compile,
            rounds=rounds,
            decode_rounds=decode_rounds,
        )
        rows, machine = _collect(measure(bench), InferenceRow, bench.device, csv, keep=keep_memory)
        _show("inference", rows, machine, by=("task", "precision", "compiled", "chunk"))

    return inference


def _pipeline(small: bool) -> Callable[..., None]:
    def pipeline(
        *,
        ranks: int = 2 if small else 4,
        virtual: tuple[int, ...] = (1, 2) if small else (1, 2, 3),
        microbatches: int = 4 if small else 8,
        layers: int = 4 if small else 24,
        dim: int = 32 if small else 256,
        head_dim: int = 16 if small else 64,
        vocab: int = 64 if small else 2048,
        blocks: int = 4 if small else 24,
        rows: int = 1 if small else 2,
        context: int = 8 if small else 256,
        rounds: int = 3 if small else 12,
        csv: Path | None = None,
        quick: bool = small,
    ) -> None:
        """Time training steps of a pipeline on processes of this machine, with its cross-stage cache and without.

        Takes about ten minutes on two cores. Run it on an idle machine.

        Args:
            ranks: Processes, one for each rank of the pipeline.
            virtual: Stages on each rank, one benchmark after the other.
            microbatches: Micro-batches of a step.
            layers: Decoder layers.
            dim: Width D.
            head_dim: Width of a head.
            vocab: Token ids.
            blocks: Blocks of Block AttnRes; as many in each stage.
            rows: Sequences of a micro-batch.
            context: Tokens of a sequence.
            rounds: Timed rounds; each visits every arm.
            csv: File to append the rows to.
            quick: Small sizes, to see that it runs.
        """
        import torch

        from attnres.bench.models import ModelShape
        from attnres.bench.pipeline import PipelineBench, PipelineRow, measure

        benches = [
            PipelineBench(
                shape=ModelShape(layers=layers, dim=dim, head_dim=head_dim, vocab=vocab, blocks=blocks),
                ranks=ranks,
                virtual=stages,
                microbatches=microbatches,
                rows=rows,
                context=context,
                rounds=rounds,
            )
            for stages in virtual
        ]
        measured = (row for bench in benches for row in measure(bench))
        rows_measured, machine = _collect(measured, PipelineRow, torch.device("cpu"), csv)
        _show("pipeline", rows_measured, machine, by=("ranks", "virtual"))

    return pipeline


def _tables(small: bool) -> Callable[..., None]:
    del small

    def tables(*, results: Path = Path("benchmarks/results"), page: Path | None = None) -> None:
        """Print the last results as Markdown tables, or put them into a page between its marks.

        Args:
            results: Folder with the result files.
            page: Markdown page to update.
        """
        from attnres.bench import page as pages

        if page is None:
            print("\n\n".join(pages.tables(results).values()))
        else:
            pages.update(page, results)

    return tables


_BENCHMARKS: dict[str, tuple[Callable[[bool], Callable[..., None]], str]] = {
    "op": (_op, "one read: forward, backward, latency; ours and other people's"),
    "phases": (_phases, "all reads of a model together, in one phase and in two"),
    "overhead": (_overhead, "whole model: training step, prefill, decoding"),
    "memory": (_memory, "what a read keeps, and the peak of a training step"),
    "inference": (_inference, "whole model: first and next token, whole and in chunks, eager and compiled"),
    "pipeline": (_pipeline, "a pipeline of processes: bytes, memory and time with the cross-stage cache and without"),
    "tables": (_tables, "the last results as Markdown"),
}


def _overview() -> str:
    width = max(map(len, _BENCHMARKS))
    lines = "\n".join(f"  {name:<{width}}  {what}" for name, (_, what) in _BENCHMARKS.items())
    return (
        f"usage: attnres bench BENCHMARK [OPTIONS]\n\nbenchmarks:\n{lines}\n\n"
        "The six measurements with their defaults take about an hour on two cores; --quick shows that they run.\n"
        "See attnres bench BENCHMARK --help."
    )


def _collect(
    rows: Iterable[Any], row_type: type[Any], device: Any, csv: Path | None, *, keep: bool = False
) -> tuple[list[Any], Any]:
    """Measure the rows, into the file too; they come with the machine."""
    from attnres.bench.allocator import keep_memory
    from attnres.bench.machine import measured_on
    from attnres.bench.results import collect, prepare

    if csv is not None:
        prepare(csv, row_type)
    kept = keep and device.type == "cpu" and keep_memory(_RESERVE_BYTES)
    machine = measured_on(device, kept_memory=kept)
    return collect(rows, machine, csv), machine


def _show(title: str, rows: Sequence[Any], machine: Any, *, by: Sequence[str]) -> None:
    from attnres.bench.table import render
    from attnres.cli.console import wide_console

    wide_console().print(render(title, rows, machine, by=by))
