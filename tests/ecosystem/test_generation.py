"""`generate` in all its ways, `pipeline`, chunked prefill, padding, hidden states."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache, pipeline, set_seed

from attnres.models import convert
from attnres.residual import BlockAttnRes, FullAttnRes
from ecosystem.checkpoints import TEXT, learned, saved, tokenizer
from models.small import ALL_CONFIGS, make

BLOCK = BlockAttnRes(sublayers_per_block=3)
FAMILIES = ["llama", "gemma3", "gpt_neox", "gpt2", "deepseek_v3", "kimi_linear", "olmo2"]


def tokens(*shape):
    return torch.randint(3, 96, shape)


def generate(model, ids, **options):
    mask = options.pop("attention_mask", torch.ones_like(ids))
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(ids, attention_mask=mask, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5},
        {"do_sample": True, "temperature": 0.8, "top_p": 0.9},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    ],
    ids=["greedy", "beams", "beams-returned", "sampling", "penalties"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_model_generates_what_the_plain_one_does(family, options):
    torch.manual_seed(3)
    plain, ids = make(family), tokens(2, 7)
    converted = convert(copy.deepcopy(plain), BLOCK)
    outputs = []
    for model in (plain, converted):
        set_seed(1)
        outputs.append(generate(model, ids, **options))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "kimi_linear"])
def test_static_and_dynamic_caches_and_none_agree(family):
    model, ids = learned(family), tokens(2, 7)
    expected = generate(model, ids, use_cache=False)
    assert torch.equal(generate(model, ids), expected)
    assert torch.equal(generate(model, ids, cache=DynamicCache(config=model.config)), expected)
    assert torch.equal(generate(model, ids, cache_implementation="static", disable_compile=True), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_left_padded_batches_give_what_each_prompt_gives_alone(family):
    model, long, short = learned(family), tokens(1, 9), tokens(1, 4)
    batch = torch.zeros(2, 9, dtype=torch.long)
    batch[0], batch[1, 5:] = long[0], short[0]
    mask = (torch.arange(9) >= torch.tensor([[0], [5]])).long()
    together = generate(model, batch, attention_mask=mask)
    assert torch.equal(together[0, 9:], generate(model, long)[0, 9:])
    assert torch.equal(together[1, 9:], generate(model, short)[0, 4:])


def test_a_padded_row_of_nan_touches_no_other_row():
    model = learned()
    embeds = torch.randn(3, 6, 32)
    with torch.no_grad():
        expected = model(inputs_embeds=embeds).logits
        embeds[1] = float("nan")
        actual = model(inputs_embeds=embeds).logits
    assert bool(actual[1].isnan().all())
    assert torch.equal(actual[[0, 2]], expected[[0, 2]])


def test_assisted_decoding_with_a_plain_assistant_and_by_a_converted_one():
    torch.manual_seed(0)
    model, plain, ids = learned(), make("llama", layers=1), tokens(1, 7)
    expected = generate(model, ids)
    assert torch.equal(generate(model, ids, assistant_model=plain), expected)
    assistant = convert(copy.deepcopy(plain), FullAttnRes())
    assert torch.equal(generate(model, ids, assistant_model=assistant), expected)
    assert torch.equal(generate(model, ids, prompt_lookup_num_tokens=3), expected)


@pytest.mark.parametrize("chunk", [1, 7, 16, 1000])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_prefill_equals_the_whole(family, chunk):
    model, ids = learned(family), tokens(1, 40)
    whole = generate(model, ids)
    assert torch.equal(generate(model, ids, prefill_chunk_size=chunk), whole)


@pytest.mark.parametrize("chunk", [1, 7, 16, 1000])
def test_logits_of_chunks_are_those_of_the_whole(chunk):
    model, ids = learned(), tokens(2, 40)
    cache, parts = DynamicCache(config=model.config), []
    with torch.no_grad():
        whole = model(ids).logits
        for part in ids.split(chunk, dim=1):
            parts.append(model(part, cache=cache, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-4)


def test_reads_of_a_chunk_are_bitwise_those_of_the_whole_given_equal_inputs():
    residual = learned().model.residual
    embedding, outputs = torch.randn(1, 40, 32), torch.randn(6, 1, 40, 32)

    def reads(tokens):
        state, found = residual.start(embedding[:, tokens]), []
        for site in range(6):
            found.append(residual.read(state, site))
            state = residual.write(state, site, outputs[site][:, tokens])
        return torch.stack([*found, residual.read(state, -1)])

    with torch.no_grad():
        whole = reads(slice(None))
        for size in (1, 7, 16):
            parts = [reads(slice(start, start + size)) for start in range(0, 40, size)]
            assert torch.equal(torch.cat(parts, dim=2), whole)


def test_nothing_of_the_residual_path_is_kept_between_steps():
    import gc

    model, ids = learned(), tokens(1, 33)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, cache=cache, use_cache=True, logits_to_keep=1)
    gc.collect()
    kept = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.shape[-2:] == (33, 32)]
    assert kept == []


def test_pipeline_from_a_folder(tmp_path):
    model = saved(tmp_path)
    generator = pipeline("text-generation", model=str(tmp_path))
    text = generator("the quick brown", max_new_tokens=5, do_sample=False)[0]["generated_text"]
    words = tokenizer()
    ids = words("the quick brown", return_tensors="pt").input_ids
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
    assert text.replace(" ", "") == words.decode(expected[0], skip_special_tokens=True).replace(" ", "")
    batch = generator(["the quick", "the lazy dog and runs away"], max_new_tokens=3, do_sample=False, batch_size=2)
    assert len(batch) == 2


@pytest.mark.parametrize("family", ALL_CONFIGS)
def test_hidden_states_are_the_reads_before_the_norms(family):
    """Entry k is what layer k reads, with its own query; the last is the final read, through the final norm."""
    model, ids = learned(family), tokens(2, 6)
    read = {}

    class Keep:
        def on_read(self, site, state, value):
            read[site] = value

        def on_write(self, site, state, output): ...

    with torch.no_grad():
        plain = model(ids).logits  # with the norms fused into the reads
        with model.base_model.residual.listen(Keep()):
            outputs = model(ids, output_hidden_states=True)
        again = model(ids, output_hidden_states=True)
    count, per_layer = model.config.num_hidden_layers, 1 if family == "gpt_neox" else 2
    assert len(outputs.hidden_states) == count + 1
    assert all(torch.equal(outputs.hidden_states[layer], read[per_layer * layer]) for layer in range(count))
    for one, other in zip(again.hidden_states, outputs.hidden_states, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(again.logits, plain, rtol=1e-4, atol=1e-4)
    (norm,) = [
        getattr(model.base_model, n) for n in ("norm", "ln_f", "final_layer_norm") if hasattr(model.base_model, n)
    ]
    assert torch.equal(outputs.hidden_states[count], norm(read[per_layer * count]))


def test_text_goes_through_a_loaded_model(tmp_path):
    saved(tmp_path)
    model, words = AutoModelForCausalLM.from_pretrained(tmp_path), tokenizer()
    batch = words([TEXT[:40], TEXT[:90]], return_tensors="pt", padding=True)
    assert bool((batch["attention_mask"][0] == 0).any())
    output = model.generate(**{k: batch[k] for k in ("input_ids", "attention_mask")}, max_new_tokens=4, do_sample=False)
    assert output.shape[0] == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strategy", [BLOCK, FullAttnRes()], ids=str)
def test_a_compiled_step_with_a_static_cache_is_one_graph_for_all_tokens(strategy):
    """The decoding path where Python's overhead would show: every token runs the same compiled code."""
    from torch._dynamo.testing import CompileCounterWithBackend

    model, ids = learned(strategy=strategy), tokens(1, 6)
    expected = generate(model, ids, max_new_tokens=10, min_new_tokens=10)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    step = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)
    cache, row = StaticCache(config=model.config, max_cache_len=32), ids
    with torch.no_grad():
        logits = model(row, cache=cache, use_cache=True).logits
        for length in range(6, 15):
            token = logits[:, -1:].argmax(-1)
            row = torch.cat([row, token], dim=1)
            logits = step(token, cache=cache, use_cache=True, position_ids=torch.tensor([[length]])).logits
        row = torch.cat([row, logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(row, expected)
    assert counter.frame_count <= 2  # a cache fresh from the prefill, and every later token
    reads = [node for graph in counter.graphs for node in graph.graph.nodes if "attnres" in str(node.target)]
    assert reads
