"""Plans of models that people fine-tune, in their real sizes, without weights.

    python benchmarks/planning/real_sizes.py [--models gemma_2b llama3_8b qwen_7b vit_h sdxl_unet]
        [--stages 4 8] [--lora 0] [--memory-limit 80GB] [--show]

Needs `pip install keras-hub` for all but the U-Net. Seconds of the processor count the whole:
building, reading and planning. Above the mean is how much longer the largest stage works than it,
and in brackets how much longer the largest operation does alone, which no plan goes below; guesses
are the kinds of operations whose costs no rule knows. `--lora 8` freezes a language model and gives
it matrices of that rank.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras

import tarantella_pp as tnt
from benchmarks.planning.published_models import unet
from tarantella_pp.models.deferred_init import only_shapes
from tarantella_pp.partition.plan.hardware_spec import roofline_seconds
from tarantella_pp.partition.plan.plan_simulation import stage_seconds

# Tokens of a sample.
TOKENS = 1024


def language_model(kind: str, policy: str = "bfloat16", **sizes: int) -> keras.Model:
    """A causal language model of KerasHub that is called with `TOKENS` tokens."""
    import keras_hub

    backbone = getattr(keras_hub.models, f"{kind}Backbone")(dtype=policy, **sizes)
    shapes = {name: keras.Input((TOKENS,), dtype="int32", name=name) for name in backbone.input}
    hidden = backbone(shapes)
    return keras.Model(shapes, backbone.token_embedding(hidden, reverse=True), name=kind.lower())


def gemma_2b() -> keras.Model:
    return language_model(
        "Gemma", vocabulary_size=256000, num_layers=18, num_query_heads=8, num_key_value_heads=1,
        hidden_dim=2048, intermediate_dim=32768, head_dim=256,
    )  # fmt: skip


def llama3_8b() -> keras.Model:
    return language_model(
        "Llama3", vocabulary_size=128256, num_layers=32, num_query_heads=32, hidden_dim=4096,
        intermediate_dim=14336, num_key_value_heads=8,
    )  # fmt: skip


def qwen_7b() -> keras.Model:
    return language_model(
        "Qwen", vocabulary_size=152064, num_layers=28, num_query_heads=28, hidden_dim=3584,
        intermediate_dim=18944, num_key_value_heads=4,
    )  # fmt: skip


def vit_h() -> keras.Model:
    import keras_hub

    return keras_hub.models.ViTBackbone(
        image_shape=(224, 224, 3), patch_size=14, num_layers=32, num_heads=16, hidden_dim=1280,
        mlp_dim=5120,
    )  # fmt: skip


def sdxl_unet() -> keras.Model:
    """About as many parameters as the U-Net of Stable Diffusion XL: 2.6 billion."""
    return unet(48, 64)


MODELS: dict[str, Callable[[], keras.Model]] = {
    build.__name__: build for build in (gemma_2b, llama3_8b, qwen_7b, vit_h, sdxl_unet)
}


def built(name: str, rank: int) -> keras.Model:
    """Builds a model without weights; with a rank, frozen but for matrices of LoRA."""
    with only_shapes():
        model = MODELS[name]()
        for layer in model.layers if rank else ():
            if isinstance(layer, keras.Model):  # the backbone
                layer.enable_lora(rank)
    return model


def balance(plan: tnt.Plan) -> str:
    """How much longer than the mean the largest stage works, and the largest operation alone."""
    machine, rows = plan.machine, plan.micro_batch_size
    stages = [sum(parts) for parts in stage_seconds(plan, machine, rows)]
    operations = [sum(parts) for parts in roofline_seconds(plan.work, rows, machine)]
    largest = [max(seconds) * len(stages) / sum(stages) - 1 for seconds in (stages, operations)]
    return f"{largest[0]:.1%} ({max(0.0, largest[1]):.1%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=MODELS)
    parser.add_argument("--stages", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--machine", default="a100")
    parser.add_argument("--memory-limit")
    parser.add_argument("--lora", type=int, default=0, help="rank of LoRA (default: none)")
    parser.add_argument("--show", action="store_true", help="print the plans")
    args = parser.parse_args()
    print("| model | weights | operations | stages | CPU s | above the mean | guesses |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | --- |")
    for name in args.models:
        for stages in args.stages:
            begun = time.process_time()
            model = built(name, args.lora)
            plan = tnt.make_plan(
                model, stages, batch_size=args.batch_size, machine=args.machine,
                memory_limit=args.memory_limit,
            )  # fmt: skip
            seconds = time.process_time() - begun
            weights = f"{model.count_params() / 1e9:.2f} G"
            guesses = ", ".join(plan.estimated) or "none"
            facts = f"{len(plan.node_names)} | {stages} | {seconds:.1f} | {balance(plan)}"
            print(f"| {name} | {weights} | {facts} | {guesses} |", flush=True)
            if args.show:
                print(f"\n{plan}\n")


if __name__ == "__main__":
    main()
