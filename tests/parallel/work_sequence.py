"""What the tests of tensor and sequence parallelism run on the ranks: a divided model against the same one whole."""

import copy
import warnings
from types import MethodType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from transformers import DynamicCache

from attnres.bench.bank import Bank
from attnres.errors import AttnResError
from attnres.models import build
from attnres.parallel.sequence import ReplicatedGradients
from attnres.parallel.tensor import parallelize
from attnres.residual import BlockAttnRes
from attnres.residual.state import storage_bytes
from models.small import ALL_CONFIGS

BLOCK = BlockAttnRes(sublayers_per_block=3)


def make_pair(family="llama", strategy=BLOCK, dtype=torch.float64, logits="all", **changes):
    """The same model whole, and divided over all ranks, with the handle of the latter."""
    torch.manual_seed(1)
    whole = build(ALL_CONFIGS[family](**changes), strategy, dtype=dtype)
    for parameter in whole.base_model.residual.parameters():
        nn.init.normal_(parameter, mean=0.1, std=0.5)
    divided = copy.deepcopy(whole)
    if dist.get_rank():  # what other ranks have does not matter
        with torch.no_grad():
            for parameter in divided.parameters():
                parameter.add_(1.0)
    if dtype == torch.float64:
        norm_exactly(whole)
        norm_exactly(divided)
    return whole, divided, parallelize(divided, make_mesh(), logits=logits)


def make_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))


def norm_exactly(model):
    """Let the norms compute in float64: Transformers' own round to float32, which hides or magnifies differences."""
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = MethodType(_rms_norm, module)


def _rms_norm(norm, value):
    return nn.functional.rms_norm(value, value.shape[-1:], norm.weight, norm.variance_epsilon)


def draw(batch, tokens, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 96, (batch, tokens), generator=generator)


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def worst_difference(whole, divided, kind="grad"):
    """The largest difference of gradients (or values), relative to the largest number of each tensor; and its name.

    A tensor whose numbers should be zero counts relative to a millionth of the largest of all.
    """
    others = dict(divided.named_parameters())
    own = [getattr(parameter, kind) for parameter in whole.parameters()]
    floor = 1e-6 * max(value.abs().max().item() for value in own if value is not None)
    worst = (0.0, "")
    for name, parameter in whole.named_parameters():
        mine, its = (getattr(parameter, kind), getattr(others[name], kind))
        if mine is None or its is None:
            if mine is not None or its is not None:
                return float("inf"), name
            continue
        error = (full(its) - mine).abs().max().item() / max(mine.abs().max().item(), floor)
        if not error <= worst[0]:
            worst = (error, name)
    return worst


def loss_of(logits, ids, mask):
    """In the dtype of the logits; Transformers' own loss is float32."""
    labels = ids.masked_fill(mask == 0, -100)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def batch_of(batch, tokens, seed):
    """Token ids, and a mask with padding in the first row."""
    ids = draw(batch, tokens, seed=seed)
    mask = torch.ones_like(ids)
    mask[0, tokens // 2 + 1 :] = 0
    return ids, mask


def run_backward(results):
    while results:
        results.pop(0).backward()


def step_against_whole(family, strategy, tokens, changes, options):
    """The relative errors of loss and gradients of one step, and the worst gradient's name."""
    whole, divided, handle = make_pair(family, strategy, **changes)
    losses, pending = [0.0, 0.0], []
    for model in (whole, divided):
        model.train(options.get("train", True))
        if "reentrant" in options:
            model.activation_checkpointing_enable({"use_reentrant": options["reentrant"]})
    for batch in range(options.get("batches", 1)):
        ids, mask = batch_of(options.get("batch", 2), tokens + batch, seed=batch)
        for at, model in enumerate((whole, divided)):
            result = loss_of(model(input_ids=ids, attention_mask=mask, use_cache=False).logits, ids, mask)
            losses[at] += result.item()
            pending.append(result)
        if not options.get("late"):
            run_backward(pending)
    run_backward(pending)
    handle.sum_gradients()
    return abs(losses[1] / losses[0] - 1), *worst_difference(whole, divided)


def site_gradients(model):
    """Of pseudo-query and key weight, by site."""
    sites = model.base_model.residual.sites
    return [torch.stack([site.pseudo_query.grad, site.key_weight.grad]) for site in sites]


def reduce_once(tokens):
    """The sites' gradients before the sum, after it, after asking again; and those of the whole model."""
    whole, divided, handle = make_pair(num_key_value_heads=4)
    ids, mask = batch_of(1, tokens, seed=0)
    for model in (whole, divided):
        loss_of(model(input_ids=ids, use_cache=False).logits, ids, mask).backward()
    before = site_gradients(divided)
    handle.sum_gradients()
    after = site_gradients(divided)
    handle.sum_gradients()
    return before, after, site_gradients(divided), site_gradients(whole)


def accumulate(ask_between, keep):
    """Worst difference after micro-batches, with sums in between or not, and gradients set to None or zero before."""
    whole, divided, handle = make_pair(tie_word_embeddings=True)
    for step in range(2):
        for batch in range(3):
            ids, mask = batch_of(2, 7, seed=10 * step + batch)
            for model in (whole, divided):
                loss_of(model(input_ids=ids, use_cache=False).logits, ids, mask).backward()
            if ask_between:
                handle.sum_gradients()
        handle.sum_gradients()
        if step == 0:
            whole.zero_grad(set_to_none=not keep)
            divided.zero_grad(set_to_none=not keep)
    return worst_difference(whole, divided)


def train(steps, options):
    """Own queries after some steps, and the worst difference of all weights to those of the whole model."""
    whole, divided, handle = make_pair(num_key_value_heads=4, layers=2)
    groups = (whole.parameters(), handle.optimizer_groups())
    optimizers = [torch.optim.AdamW(group, lr=1e-3, eps=1e-4, **options) for group in groups]
    handle.before_each_step(optimizers[1])
    for step in range(steps):
        ids, mask = batch_of(2, 5 + step % 3, seed=step)
        for model, optimizer in zip((whole, divided), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model(input_ids=ids, use_cache=False).logits, ids, mask).backward()
            optimizer.step()
    queries = torch.cat([site.pseudo_query.detach() for site in divided.base_model.residual.sites])
    return queries, worst_difference(whole, divided, kind="data")


def own_losses(tokens, tied):
    """With logits of own tokens: the error of the sum of the ranks' losses, and of the gradients."""
    whole, divided, handle = make_pair(logits="own", tie_word_embeddings=tied)
    ids, _ = batch_of(2, tokens, seed=0)
    labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], dim=1)
    expected = _sum_loss(whole(input_ids=ids, use_cache=False).logits, labels)
    logits = divided(input_ids=ids, use_cache=False).logits
    loss = _sum_loss(logits, handle.own(labels))
    expected.backward()
    loss.backward()
    handle.sum_gradients()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return logits.shape[1], abs(total.item() / expected.item() - 1), *worst_difference(whole, divided)


def _sum_loss(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


@torch.no_grad()
def infer(strategy, dtype, tokens):
    """Largest error of the logits in evaluation, relative to the largest, and greedy text of both models."""
    whole, divided, _ = make_pair("llama", strategy, dtype=dtype, num_key_value_heads=4)
    whole.eval(), divided.eval()
    ids, mask = batch_of(2, tokens, seed=3)
    expected, found = (model(input_ids=ids, attention_mask=mask).logits for model in (whole, divided))
    texts = [model.generate(ids, max_new_tokens=6, do_sample=False).tolist() for model in (whole, divided)]
    return ((found - expected).abs().max() / expected.abs().max()).item(), *texts


@torch.no_grad()
def look_through_head():
    """Whether norm and head take any hidden states as those of the whole model do, and the shape of the result."""
    whole, divided, _ = make_pair()
    hidden = torch.randn(2, 7, 32, dtype=torch.float64)
    expected, found = (model.lm_head(model.model.norm(hidden)) for model in (whole, divided))
    return torch.allclose(found, expected, rtol=1e-12), tuple(found.shape)


def clip():
    """Norms before clipping of both models, and the worst difference of the gradients after it."""
    whole, divided, handle = make_pair("qwen2")
    ids, mask = batch_of(2, 7, seed=0)
    for model in (whole, divided):
        loss_of(model(input_ids=ids, use_cache=False).logits, ids, mask).backward()
    norms = nn.utils.clip_grad_norm_(whole.parameters(), 0.1), handle.clip_gradients(0.1)
    return norms[0].item(), norms[1].item(), *worst_difference(whole, divided)


def count_exchanges():
    """Collectives by kind, in one forward pass and in the backward pass after it."""
    _, divided, _ = make_pair()
    ids, mask = batch_of(2, 7, seed=0)
    with warnings.catch_warnings():  # of the hooks by which they are counted
        warnings.filterwarnings("ignore", message="(For backward hooks|Full backward hook)")
        with CommDebugMode() as forward:
            loss = loss_of(divided(input_ids=ids, use_cache=False).logits, ids, mask)
        with CommDebugMode() as backward:
            loss.backward()
    return [by_kind(mode.get_comm_counts()) for mode in (forward, backward)]


def by_kind(counts):
    kinds = {"scatter": 0, "gather": 0, "reduce": 0}
    for name, count in counts.items():
        kinds[next(kind for kind in kinds if kind in str(name))] += count
    return kinds


def autocast_step():
    """Under autocast to bfloat16, of both models: dtypes of logits and gradients; errors of logits and gradients."""
    whole, divided, handle = make_pair(dtype=torch.float32)
    ids, mask = batch_of(2, 7, seed=0)
    logits = []
    for model in (whole, divided):
        with torch.autocast("cpu", torch.bfloat16):
            logits.append(model(input_ids=ids, use_cache=False).logits)
        loss_of(logits[-1].float(), ids, mask).backward()
    handle.sum_gradients()
    dtypes = {parameter.grad.dtype for parameter in divided.parameters()}
    error = (logits[1] - logits[0]).abs().max() / logits[0].abs().max()
    return logits[0].dtype, logits[1].dtype, dtypes, error.item(), *worst_difference(whole, divided)


def sum_replicated(dtype, given):
    """The sum over the ranks of one number per rank, through gradients of a dtype."""
    module = nn.Linear(1, 1, bias=False, dtype=dtype)
    gradients = ReplicatedGradients([(module, "weight")], dist.group.WORLD)
    (module.weight * given[dist.get_rank()]).sum().backward()
    gradients.sum()
    return module.weight.grad.item()


def refuse(family, strategy, changes):
    """The error of parallelizing."""
    model = build(ALL_CONFIGS[family](**changes), strategy)
    try:
        parallelize(model, make_mesh())
    except AttnResError as error:
        return type(error).__name__, str(error)
    return None


def refuse_misuse():
    """Errors of a mesh of two dimensions, unknown logits, a second time, a plain model, and labels for own logits."""
    model = build(ALL_CONFIGS["llama"](), BLOCK)
    square = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("data", "tensor"))
    ids = draw(1, 4)
    calls = [
        lambda: parallelize(model, square),
        lambda: parallelize(model, square["tensor"], logits="some"),
        lambda: parallelize(model, square["tensor"], logits="own") and None,
        lambda: parallelize(model, square["tensor"]),
        lambda: parallelize(nn.Linear(2, 2), square["tensor"]),
        lambda: model(input_ids=ids, labels=ids),
        lambda: model(input_ids=ids, logits_to_keep=1),
    ]
    said = []
    for call in calls:
        try:
            call()
            said.append("")
        except AttnResError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def unfrozen_parameter():
    """Worst difference with a frozen query, and the error of a sum after it has been unfrozen."""
    model = build(ALL_CONFIGS["llama"](), BLOCK)
    frozen = model.base_model.residual.sites[1].pseudo_query.requires_grad_(False)
    handle = parallelize(model, make_mesh())
    ids, mask = batch_of(2, 7, seed=0)
    loss_of(model(input_ids=ids, use_cache=False).logits, ids, mask).backward()
    handle.sum_gradients()
    assert frozen.grad is None
    frozen.requires_grad_()
    loss_of(model(input_ids=ids, use_cache=False).logits, ids, mask).backward()
    try:
        handle.sum_gradients()
    except AttnResError as error:
        return str(error)
    return None


def replaced_parameter(how):
    """The error of a sum after a watched parameter has been replaced, by hand or by FSDP, which replaces all."""
    torch.manual_seed(1)
    divided = build(ALL_CONFIGS["llama"](), BLOCK)
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("data", "tensor"))
    handle = parallelize(divided, mesh["tensor"])
    site = divided.base_model.residual.sites[1]
    if how == "fsdp":
        fully_shard(divided, mesh=mesh["data"])
    else:
        site.pseudo_query = nn.Parameter(site.pseudo_query.detach().clone())
    try:
        handle.sum_gradients()
    except AttnResError as error:
        return str(error)
    return None


@torch.no_grad()
def own_sources(strategy, tokens):
    """A rank's sources at the output, ``[sources, batch, own tokens, dim]``, and those of the whole model."""
    pair = make_pair("llama", strategy, num_key_value_heads=4)[:2]
    found = []
    for model in pair:
        last = LastSources()
        with model.base_model.residual.listen(last):
            model(input_ids=draw(2, tokens), use_cache=False)
        found.append(torch.stack(last.sources))
    return found[1], found[0]


class LastSources:
    """A listener that keeps the sources of the last read."""

    def on_read(self, site, state, value):
        self.sources = state.sources

    def on_write(self, site, state, output):
        pass


@torch.no_grad()
def measure_bank(strategy, tokens, chunk, batch, layers):
    """Bytes of the sources by chunk and site while a prompt is taken in chunks; the most of them; the logits' error."""
    whole, divided, _ = make_pair("llama", strategy, num_key_value_heads=4, layers=layers)
    whole.eval(), divided.eval()
    ids = draw(batch, tokens)
    bank, cache, measured, logits = Bank(), DynamicCache(config=divided.config), [], []
    for part in ids.split(chunk, dim=1):
        listener = SourceBytes()
        residual = divided.base_model.residual
        with residual.listen(listener), residual.listen(bank):
            logits.append(divided(input_ids=part, cache=cache).logits)
        measured.append(listener.by_site)
    error = (torch.cat(logits, dim=1) - whole(input_ids=ids).logits).abs().max().item()
    return measured, bank.largest, error


class SourceBytes:
    """A listener that notes the bytes of the sources at each read."""

    def __init__(self):
        self.by_site = []

    def on_read(self, site, state, value):
        assert site == len(self.by_site)
        self.by_site.append(storage_bytes(state.sources))

    def on_write(self, site, state, output):
        pass
