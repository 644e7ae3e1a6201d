"""KerasHub's backbones and tasks, small: planned, and trained as plain Keras trains them?

    pip install 'tarantella-pp[hub]'
    tarantella -n 2 -- benchmarks/training/keras_hub.py --out hub.jsonl
    python benchmarks/training/keras_hub.py GPT2 ViT    # names that begin so; without replicas

Each is built from a small configuration, with numbers for strings, and trained in float64 for two
steps: by plain Keras, in two stages of two micro-batches, and on two ranks as two replicas.
A line of JSON says what became of each; models that the file has already are left out.
"""

from __future__ import annotations

import argparse
import csv
import inspect
import json
import logging
import re
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# This file has the name of the package.
HERE = Path(__file__).resolve().parent
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != HERE]

import keras  # noqa: E402
import keras_hub  # noqa: E402
import numpy as np  # noqa: E402
from keras.src.backend.common.dtypes import PYTHON_DTYPES_MAP  # noqa: E402
from keras_hub.src.models.vae.vae_backbone import VAEBackbone  # noqa: E402

import tarantella_pp as tnt  # noqa: E402

hub: Any = keras_hub.models
ROWS, LENGTH = 8, 8
EXACT = 1e-10  # how far apart, relative, losses and weights may be
# What the arguments of constructors are, by their names.
SMALL: dict[str, Any] = {
    "vocabulary_size": 24, "num_layers": 2, "num_heads": 2, "num_query_heads": 2,
    "num_key_value_heads": 2, "hidden_dim": 16, "intermediate_dim": 16, "head_dim": 8,
    "max_sequence_length": LENGTH, "dropout": 0.0, "embedding_dim": 8, "num_groups": 1,
    "num_encoder_layers": 2, "num_decoder_layers": 2, "num_experts": 2, "top_k": 1,
    "moe_intermediate_dim": 16, "shared_expert_intermediate_dim": 16, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "sliding_window": 4, "sliding_window_size": 4,
    "image_shape": (32, 32, 3), "patch_size": 8, "mlp_dim": 16, "key_value_dim": 8,
    "bucket_size": 4, "num_classes": 3, "image_size": 32,
    "attention_logit_soft_cap": None, "final_logit_soft_cap": None, "num_mels": 8,
    "max_encoder_sequence_length": LENGTH, "max_decoder_sequence_length": LENGTH,
    "rotary_pct": 0.5, "rotary_percentage": 0.5, "rotary_dim": 4, "drop_path_rate": 0.0,
    "pooling": "avg", "embedding_size": 8, "hidden_size": 16, "use_bias": True,
    "attention_dropout": 0.0, "feedforward_dropout": 0.0, "dropout_rate": 0.0,
}  # fmt: skip
SMALL |= dict.fromkeys(("vocab_size", "text_vocab_size"), SMALL["vocabulary_size"])
for _prefix in ("encoder_", "decoder_", ""):
    SMALL |= {
        f"{_prefix}hidden_dim": 16, f"{_prefix}intermediate_dim": 16, f"{_prefix}num_layers": 2,
        f"{_prefix}num_attention_heads": 2, f"{_prefix}num_key_value_heads": 2,
        f"{_prefix}head_dim": 8, f"{_prefix}layer_types": ["full_attention"] * 2,
        f"{_prefix}num_heads": 2,
    }  # fmt: skip
_VIT = {"image_shape": (16, 16, 3), "patch_size": 8}
_RESNET = partial(
    hub.ResNetBackbone, [64], [7], [64, 16, 16, 16], [1] * 4, [1, 2, 2, 2], "basic_block"
)
# What else the constructors of single backbones need.
SPECIAL: dict[str, dict[str, Any]] = {
    "BASNet": {"image_encoder": _RESNET, "image_shape": (64, 64, 3), "projection_filters": 64},
    "CLIP": {"vision_encoder": "CLIPVisionEncoder", "text_encoder": "CLIPTextEncoder",
             "projection_dim": 8},
    "MetaCLIP2": {"vision_encoder": "MetaCLIP2VisionEncoder",
                  "text_encoder": "MetaCLIP2TextEncoder", "projection_dim": 8},
    "SigLIP": {"vision_encoder": "SigLIPVisionEncoder", "text_encoder": "SigLIPTextEncoder"},
    "SigLIPTextEncoder": {"embedding_dim": 16, "projection_dim": 16},
    "CLIPTextEncoder": {"embedding_dim": 16}, "MetaCLIP2TextEncoder": {"embedding_dim": 16},
    "CSPNet": {"stem_filters": 8, "stem_kernel_size": 3, "stem_strides": 2,
               "stackwise_depth": [1, 1], "stackwise_strides": [1, 2],
               "stackwise_num_filters": [8, 16], "block_type": "dark_block", "stage_type": "dark"},
    "DINOV2": {**_VIT, "position_embedding_shape": (16, 16, 3)}, "DINOV3": _VIT, "DeiT": _VIT,
    "ViT": _VIT,
    "DeepLabV3": {"image_encoder": _RESNET, "spatial_pyramid_pooling_key": "P3",
                  "upsampling_size": 8, "dilation_rates": [2], "image_shape": (64, 64, 3)},
    "DenseNet": {"stackwise_num_repeats": [1, 1], "growth_rate": 4},
    "DFine": {"backbone": partial(
        hub.HGNetV2Backbone, [1, 1, 1, 1], 8, [16, 16, 16, 16], [3, 8, 8], "relu", False,
        [[8, 8, 16, 1, 1, 3], [16, 8, 16, 1, 1, 3], [16, 8, 16, 1, 1, 3], [16, 8, 16, 1, 1, 3]],
        [False, True, True, True], [False] * 4, image_shape=(64, 64, 3),
        out_features=["stage3", "stage4"]),
              "decoder_in_channels": [16, 16], "encoder_hidden_dim": 16, "num_labels": 3,
              "num_denoising": 0, "learn_initial_query": False, "num_queries": 4,
              "anchor_image_size": (64, 64), "feat_strides": [16, 32], "num_feature_levels": 2,
              "encoder_in_channels": [16, 16], "encode_proj_layers": [1],
              "num_attention_heads": 2, "encoder_ffn_dim": 16, "num_encoder_layers": 1,
              "hidden_expansion": 0.5, "depth_multiplier": 0.5, "eval_idx": -1,
              "num_decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 16,
              "decoder_n_points": [2, 2], "lqe_hidden_dim": 8, "num_lqe_layers": 2,
              "out_features": ["stage3", "stage4"], "image_shape": (64, 64, 3), "seed": 0},
    "DepthAnything": {
        "image_encoder": partial(hub.DINOV2Backbone, 8, 4, 16, 2, 16, image_shape=(64, 64, 3),
                                 position_embedding_shape=(64, 64, 3), apply_layernorm=True),
        "reassemble_factors": [4, 2, 1, 0.5], "neck_hidden_dims": [8] * 4,
        "fusion_hidden_dim": 8, "head_hidden_dim": 8, "head_in_index": -1,
        "feature_keys": ["stage1", "stage2", "stage3", "stage4"]},
    "EfficientNet": {"stackwise_kernel_sizes": [3, 3], "stackwise_num_repeats": [1, 1],
                     "stackwise_input_filters": [8, 8], "stackwise_output_filters": [8, 16],
                     "stackwise_expansion_ratios": [1, 4],
                     "stackwise_squeeze_and_excite_ratios": [0.25, 0.25],
                     "stackwise_strides": [1, 2], "stackwise_block_types": ["v1", "v1"],
                     "stackwise_width_coefficients": [1.0, 1.0],
                     "stackwise_depth_coefficients": [1.0, 1.0], "input_shape": (32, 32, 3),
                     "stackwise_force_input_filters": [0, 0], "num_features": 16,
                     "stackwise_nores_option": [False, False]},
    "EdRec": {"num_layers_enc": 2, "num_layers_dec": 2},
    "Falcon": {"num_attention_heads": 2},
    "Flux": {"input_channels": 8, "mlp_ratio": 2.0, "depth": 2, "depth_single_blocks": 2,
             "axes_dim": [2, 4, 2], "theta": 1000, "image_shape": (4, 8), "text_shape": (4, 8),
             "image_ids_shape": (4, 3), "text_ids_shape": (4, 3), "y_shape": (8,)},
    "HGNetV2": {"depths": [1, 1], "embedding_size": 8, "hidden_sizes": [16, 16],
                "stem_channels": [3, 8, 8], "hidden_act": "relu",
                "use_learnable_affine_block": False,
                "stackwise_stage_filters": [[8, 8, 16, 1, 1, 3], [16, 8, 16, 1, 1, 3]],
                "apply_downsample": [False, True], "use_lightweight_conv_block": [False, False]},
    "MiT": {"layerwise_depths": [1, 1], "layerwise_num_heads": [1, 2], "max_drop_path_rate": 0.0,
            "layerwise_sr_ratios": [2, 1], "layerwise_patch_sizes": [7, 3],
            "layerwise_strides": [4, 2], "hidden_dims": [8, 16]},
    "Moonshine": {"filter_dim": 16, "encoder_num_heads": 2, "decoder_num_heads": 2},
    "PARSeq": {"image_encoder": "ViT", "max_label_length": LENGTH, "decoder_hidden_dim": 16,
               "num_decoder_heads": 2, "decoder_mlp_dim": 16},
    "PaliGemma": {"image_size": 16, "vit_patch_size": 8, "vit_num_heads": 2, "vit_hidden_dim": 16,
                  "vit_num_layers": 2, "vit_intermediate_dim": 16},
    "Phi3": {"pretraining_sequence_length": LENGTH},
    "RWKV7": {"head_size": 8, "gate_lora": 4, "mv_lora": 4, "aaa_lora": 4, "decay_lora": 4},
    "ResNet": {"input_conv_filters": [64], "input_conv_kernel_sizes": [7],
               "stackwise_num_filters": [64, 16, 16], "stackwise_num_blocks": [1, 1, 1],
               "stackwise_num_strides": [1, 2, 2], "block_type": "basic_block"},
    "RetinaNet": {"image_encoder": "ResNet", "min_level": 3, "max_level": 4, "use_p5": False,
                  "image_shape": (32, 32, 3)},
    "RoformerV2": {"head_size": 8},
    "SegFormer": {"image_encoder": "MiT", "projection_filters": 8},
    "SmolLM3": {"attention_bias": False, "rope_layer_enabled_list": [True, True],
                "mlp_bias": False, "layer_norm_epsilon": 1e-6, "max_position_embeddings": LENGTH,
                "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    "SwinTransformer": {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4,
                        "patch_size": 4, "drop_path": 0.0},
    "Qwen3_5": {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "layer_types": ["linear_attention", "full_attention"]},
    "MobileNet": {"stackwise_expansion": [[8], [16]], "stackwise_num_blocks": [1, 1],
                  "stackwise_num_filters": [[8], [16]], "stackwise_kernel_size": [[3], [5]],
                  "stackwise_num_strides": [[2], [1]], "stackwise_se_ratio": [[None], [0.25]],
                  "stackwise_activation": [["relu"], ["relu"]],
                  "stackwise_padding": [[1], [2]], "output_num_filters": 16,
                  "depthwise_filters": 8, "depthwise_stride": 2, "depthwise_residual": False,
                  "last_layer_filter": 16},
    "MobileNetV5": {"stackwise_block_types": [["er"], ["uir", "uir"]],
                    "stackwise_num_blocks": [1, 2], "stackwise_num_filters": [[8], [16, 16]],
                    "stackwise_strides": [[2], [2, 1]],
                    "stackwise_act_layers": [["relu"], ["relu", "relu"]],
                    "stackwise_exp_ratios": [[2.0], [2.0, 2.0]],
                    "stackwise_dw_kernel_sizes": [[0], [3, 3]],
                    "stackwise_exp_kernel_sizes": [[3], [0, 0]],
                    "stackwise_pw_kernel_sizes": [[1], [0, 0]],
                    "stackwise_use_cpe": [[False], [False, False]], "stem_size": 8,
                    "use_msfa": False, "image_shape": (32, 32, 3)}
    | {f"stackwise_{_kind}": [[0], [0, 0]] for _kind in (
        "se_ratios", "dw_start_kernel_sizes", "dw_end_kernel_sizes", "num_heads", "key_dims",
        "value_dims", "kv_strides")},
    "VGG": {"stackwise_num_repeats": [1, 1], "stackwise_num_filters": [8, 16]},
    "ViTDet": {"global_attention_layer_indices": [1], "num_output_channels": 8, "window_size": 2},
    "VideoPrism": {"num_frames": 2, "num_spatial_layers": 1, "num_temporal_layers": 1,
                   "num_auxiliary_layers": 0, **_VIT},
    "Xception": {"stackwise_conv_filters": [[8, 8], [8, 8]], "stackwise_pooling": [True, False]},
    "Whisper": {"max_encoder_sequence_length": LENGTH},
    "Gemma3n": {"text_hidden_size": 16, "num_hidden_layers": 2, "pad_token_id": 0,
                "intermediate_size": [16, 16], "hidden_activation": "gelu_approximate",
                "rope_theta": 1e4, "max_position_embeddings": LENGTH,
                "vocab_size_per_layer_input": 24, "hidden_size_per_layer_input": 4,
                "altup_num_inputs": 2, "laurel_rank": 4},
    "BLIP2": {
        "vision_encoder": partial(
            hub.BLIP2VisionEncoder, 16, 8, 2, 2, 16, 16, True, True, True, True, 0.0, 1e-6, 0.02),
        "qformer": partial(hub.BLIP2QFormer, 2, 2, 2, 16, 16, 16, 1, 0.0, 1e-6),
        "language_model": partial(hub.BLIP2CustomOPT, 24, 2, 2, 16, 16, 2, 0.0, LENGTH + 2, 16)},
    "SAM": {
        "image_encoder": partial(
            hub.ViTDetBackbone, 16, 2, 16, 2, [1], image_shape=(32, 32, 3), patch_size=16,
            num_output_channels=8, window_size=2),
        "prompt_encoder": partial(
            keras_hub.layers.SAMPromptEncoder, hidden_size=8, image_embedding_size=(2, 2),
            input_image_size=(32, 32), mask_in_channels=8),
        "mask_decoder": partial(
            keras_hub.layers.SAMMaskDecoder, hidden_size=8, num_layers=2, intermediate_dim=16,
            num_heads=2, embedding_dim=8, iou_head_depth=2, iou_head_hidden_dim=8)},
    "SAM3PromptableConcept": {
        "vision_encoder": partial(
            keras_hub.layers.SAM3VisionEncoder, (56, 56, 3), 14, 2, 16, 16, 2, 16,
            [4.0, 2.0, 1.0, 0.5], (28, 28, 3), window_size=2, global_attn_indexes=[1]),
        "text_encoder": partial(keras_hub.layers.SAM3TextEncoder, 24, 16, 16, 2, 2, 16,
                                max_sequence_length=LENGTH),
        "geometry_encoder": partial(keras_hub.layers.SAM3GeometryEncoder, 2, 16, 16, 2, 3),
        "detr_encoder": partial(keras_hub.layers.SAM3DetrEncoder, 2, 16, 16, 2),
        "detr_decoder": partial(keras_hub.layers.SAM3DetrDecoder, (56, 56, 3), 14, 2, 16, 16, 2, 4),
        "mask_decoder": partial(keras_hub.layers.SAM3MaskDecoder, 3, 16, 2)},
    "StableDiffusion3": {
        "mmdit_patch_size": 2, "mmdit_hidden_dim": 32, "mmdit_num_layers": 2, "mmdit_num_heads": 2,
        "mmdit_position_size": 192, "mmdit_qk_norm": None, "mmdit_dual_attention_indices": None,
        "vae": partial(VAEBackbone,
                       [32] * 4, [1] * 4, [32] * 4, [1] * 4, sampler_method="mode"),
        "clip_l": partial(hub.CLIPTextEncoder, 24, 16, 16, 2, 2, 16, "quick_gelu", -2),
        "clip_g": partial(hub.CLIPTextEncoder, 24, 16, 16, 2, 2, 16, "gelu", -2),
        "image_shape": (64, 64, 3)},
}  # fmt: skip
SPECIAL["Qwen3Moe"] = SPECIAL["QwenMoe"] = {"num_experts": 4, "top_k": 2}
SPECIAL["Qwen3_5Moe"] = SPECIAL["Qwen3_5"]
for _name in ("CLIP", "MetaCLIP2", "SigLIP"):
    SPECIAL[f"{_name}VisionEncoder"] = _VIT
# Sizes of inputs that are not as long as others, by the begin of a model's name.
SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "Moonshine": {"encoder_input_values": (2048, 1), "encoder_padding_mask": (2048,)},
    "SAMB": {"masks": (1, 8, 8, 1)}, "SAMI": {"masks": (1, 8, 8, 1)},
}  # fmt: skip
TASK = {
    "num_classes": 3, "preprocessor": None, "compile": False, "dropout": 0.0,
    "depth_estimation_type": "relative", "backbone_hidden_size": 16, "num_centroids": 4,
    "centroid_intermediate_top_k": 2, "use_ordered_embeddings": False,
}  # fmt: skip


def compute_in_float64() -> None:
    """Has KerasHub compute in float64 where it casts to float32, and count in int32 as ever.

    Beside float64 `arange` makes int64, which T5 and SAM 3 add to int32.
    """
    keras.config.set_floatx("float64")
    PYTHON_DTYPES_MAP["float32"] = "float64"
    zeros, arange = keras.ops.zeros, keras.ops.arange

    def counted(*args: Any, dtype: Any = None, **kwargs: Any) -> Any:
        found = arange(*args, dtype=dtype, **kwargs)
        return keras.ops.cast(found, "int32") if dtype is None and found.dtype == "int64" else found

    keras.ops.arange = counted
    keras.ops.zeros = lambda shape, dtype=None: zeros(shape, keras.backend.standardize_dtype(dtype))


def backbone_of(name: str) -> Any:
    """A small backbone; others inside it, which are given by name, are made as small."""
    kind = getattr(hub, name if hasattr(hub, name) else f"{name}Backbone")
    special = SPECIAL.get(name.removesuffix("Backbone"), {})
    given = {}
    for option in inspect.signature(kind.__init__).parameters.values():
        required = option.default is option.empty or option.name.endswith("dropout")
        if option.name in special:
            given[option.name] = special[option.name]
        elif option.name in SMALL and (required or "shape" in option.name or "max_" in option.name):
            given[option.name] = SMALL[option.name]
    for option_name, value in given.items():
        if isinstance(value, str) and option_name.endswith(("encoder", "backbone")):
            given[option_name] = backbone_of(value)
        elif isinstance(value, partial):
            given[option_name] = value()
    return kind(**given)


def made(name: str) -> Any:
    """A backbone, or a task around one, which draws no random numbers."""
    model = _made(name)
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = 0.0
    return model


def _made(name: str) -> Any:
    keras.utils.set_random_seed(1)
    kind = getattr(hub, name)
    if issubclass(kind, hub.Backbone):
        return backbone_of(name)
    backbone = backbone_of(kind.backbone_cls.__name__)
    known = inspect.signature(kind.__init__).parameters
    given = {key: value for key, value in TASK.items() if key in known or key == "compile"}
    return kind(backbone=backbone, **given)


def inputs_of(model: Any) -> Any:
    """Random samples of the shapes that a model takes."""
    draws = np.random.default_rng(2)
    special = [sizes for begin, sizes in SIZES.items() if type(model).__name__.startswith(begin)]

    def draw(tensor: Any) -> Any:
        size = 32 if "image" in tensor.name else LENGTH
        shape = (ROWS, *(known or size for known in tensor.shape[1:]))
        if special and tensor.name in special[0]:
            shape = (ROWS, *special[0][tensor.name])
        if "mask" in tensor.name and "positions" not in tensor.name:
            return np.ones(shape, tensor.dtype)
        if "boxes" in tensor.name:
            return draws.uniform(0.2, 0.6, shape).astype(tensor.dtype)
        if "segment" in tensor.name or "box_labels" in tensor.name:
            return draws.integers(0, 2, shape).astype(tensor.dtype)
        if "positions" in tensor.name or "indices" in tensor.name:
            return draws.integers(0, 4, shape).astype(tensor.dtype)
        if tensor.dtype.startswith("int"):
            return draws.integers(1, 20, shape).astype(tensor.dtype)
        return draws.normal(size=shape).astype(tensor.dtype)

    return keras.tree.map_structure(draw, getattr(model, "_inputs_struct", model.input))


def compiled(model: Any) -> Any:
    """The model with a loss for each output, whatever the `compile` of a task adds for tokens."""
    losses = keras.tree.map_structure(lambda _: "mse", model.output)
    keras.Model.compile(model, keras.optimizers.Adam(1e-3), losses)
    return model


def trained(model: Any, x: Any, y: Any) -> dict[str, Any]:
    """Losses and weights after two steps."""
    history = model.fit(x, y, batch_size=ROWS, epochs=2, verbose=0, shuffle=False).history
    return {"loss": history["loss"], "weights": model.get_weights()}


def distance(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Largest difference, relative to the largest number of each loss or weight."""
    pairs = zip(
        [*found["weights"], found["loss"]], [*expected["weights"], expected["loss"]], strict=True
    )
    return max(
        float(np.max(np.abs(np.subtract(a, b))) / max(np.max(np.abs(b)), 1e-3))
        for a, b in pairs
        if np.size(a) and np.asarray(a).dtype.kind == "f"
    )


def in_stages(model: Any, num_micro_batches: int = 2) -> Any:
    """The model in two stages."""
    return tnt.PipelineModel(model, num_stages=2, num_micro_batches=num_micro_batches)


def row_of(name: str, known: dict[str, Any] | None = None) -> dict[str, Any]:
    """What becomes of a model; what is known of it already is not tried again."""
    row: dict[str, Any] = {"name": name, **(known or {})}
    try:
        model = made(name)
        kinds = [type(layer) for layer in model._flatten_layers()]
        row["has batch statistics"] = keras.layers.BatchNormalization in kinds
        x = inputs_of(model)
        given = keras.tree.map_structure(np.asarray, model(x))
        draws = np.random.default_rng(3)
        y = keras.tree.map_structure(lambda value: draws.normal(size=np.shape(value)), given)
        expected = trained(compiled(made(name)), x, y)
    except Exception as error:
        return {**row, "plain": told_error(error)}

    def tried(wrap: Callable[[Any], Any]) -> float | str:
        try:
            wrapped = wrap(compiled(made(name)))
            if wrap is in_stages:
                costs = [stage.flops for stage in wrapped.plan.stages]
                row["operations"] = len(wrapped.plan.assignment)
                row["balance"] = round(max(costs) / (sum(costs) / len(costs)), 3)
            return distance(trained(wrapped, x, y), expected)
        except Exception as error:
            return told_error(error)

    if "pipeline" not in row:
        row["pipeline"] = tried(in_stages)
    if not is_exact(row["pipeline"]) and "one micro-batch" not in row:
        row["one micro-batch"] = tried(lambda model: in_stages(model, 1))
    if tnt.get_size() == 2 and "replicas" not in row:
        row["replicas"] = tried(tnt.Model)
    return row


def told_error(error: Exception) -> str:
    """An error in one line, without colours."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", f"{type(error).__name__}: {error}")
    return " ".join(text.split())[:600]


def is_exact(found: Any) -> bool:
    """Whether a model ended with the numbers of plain Keras."""
    return isinstance(found, float) and found < EXACT


def told(found: Any) -> str:
    """What became of a model, in a word or a number."""
    if isinstance(found, float):
        return "exact" if found < EXACT else f"{found:.0e}"
    if found is None:
        return ""
    return "refused" if found.startswith("UnsupportedModelError") else "fails"


def why(row: dict[str, Any]) -> str:
    """Why a model is not exact."""
    found = [row.get(kind) for kind in ("pipeline", "replicas")]
    where = r"\w+: (Rank \d+ could not run stage \d+: )?"
    errors = [re.sub(f"^{where}", "", text) for text in found if isinstance(text, str)]
    reason = re.split("[:,.] ", errors[0])[0] if errors else ""
    if not errors and not all(map(is_exact, found)) and row.get("has batch statistics"):
        reason = "BatchNormalization takes statistics of a micro-batch"
    elif not errors and not all(map(is_exact, found[:1])):
        reason = "casts to float32 by itself"
    if is_exact(row.get("one micro-batch")):
        reason += "; one micro-batch: exact"
    return reason


def write_table(rows: list[dict[str, Any]], file: Any) -> None:
    """Writes the table of docs/kerashub.md."""
    table = csv.writer(file, lineterminator="\n")
    table.writerow(["model", "operations", "balance", "2 stages", "2 replicas", "why"])
    for row in sorted(rows, key=lambda row: str(row["name"])):
        if "plain" not in row:
            cells = [row["name"], row.get("operations", ""), row.get("balance", "")]
            results = [told(row.get("pipeline")), told(row.get("replicas"))]
            table.writerow([*cells, *results, why(row)])


def names_of(prefixes: list[str]) -> list[str]:
    """All backbones and tasks, abstract ones and other names of the same classes left out."""
    found: dict[Any, str] = {}
    abstract = (hub.Backbone, hub.FeaturePyramidBackbone)
    for name in sorted(dir(hub)):
        kind = getattr(hub, name)
        if not inspect.isclass(kind) or name != kind.__name__:
            continue
        is_task = issubclass(kind, hub.Task) and kind.backbone_cls is not None
        is_backbone = issubclass(kind, hub.Backbone) and kind not in abstract
        if (is_task or is_backbone) and (not prefixes or name.startswith(tuple(prefixes))):
            found.setdefault(kind, name)
    return sorted(found.values(), key=lambda name: "Backbone" not in name)


def main() -> None:
    """Tries the models that the file does not have yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path, default=Path("hub.jsonl"))
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no model after these")
    parser.add_argument("--table", action="store_true", help="print what the file has, and end")
    given = parser.parse_args()
    compute_in_float64()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    lines = given.out.read_text().splitlines() if given.out.exists() else []
    rows = {row["name"]: row for row in map(json.loads, lines)}
    if given.table:
        write_table(list(rows.values()), sys.stdout)
        return
    last = "replicas" if tnt.get_size() == 2 else "pipeline"
    start = time.perf_counter()
    for name in names_of(given.names):
        begin = time.perf_counter()
        is_known = name in rows and not rows[name].keys().isdisjoint((last, "plain"))
        if is_known or tnt.allreduce(begin - start, op="max") > given.seconds:
            continue
        row = row_of(name, rows.get(name)) | {"seconds": round(time.perf_counter() - begin, 1)}
        if tnt.is_master_rank():
            with given.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        print(row, flush=True)
        keras.backend.clear_session()


if __name__ == "__main__":
    main()
