"""transformers' TrainingArguments as JSON or YAML. Imports no transformers."""

from __future__ import annotations

from halfstep.doctor.settings import SettingsFile, SettingSource
from halfstep.doctor.sources.reading import read_precision_word, read_training_settings

ARGUMENTS = frozenset(
    {
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "num_train_epochs",
        "gradient_accumulation_steps",
        "lr_scheduler_type",
        "warmup_ratio",
        "warmup_steps",
        "output_dir",
        "overwrite_output_dir",
        "save_strategy",
        "eval_strategy",
        "evaluation_strategy",
        "logging_steps",
        "save_steps",
        "optim",
        "adam_beta1",
        "adam_beta2",
        "weight_decay",
        "max_grad_norm",
        "gradient_checkpointing",
        "bf16_full_eval",
        "fp16_full_eval",
        "fp16_opt_level",
        "half_precision_backend",
    }
)
"""Fields by which a file of TrainingArguments is known."""
_TELLS_NOTHING = {
    "bf16_full_eval": "evaluation only: weights are also stored in bf16",
    "fp16_full_eval": "evaluation only: weights are also stored in fp16",
    "tf32": "fp32 products as tf32 on NVIDIA GPUs since Ampere",
    "use_cpu": "transformers runs on the CPU",
    "logging_nan_inf_filter": "losses that are not finite are left out of the logs",
}


def read_arguments_settings(document: SettingsFile) -> SettingSource:
    """Return the precision fields of TrainingArguments; `false` leaves the choice to the environment."""
    content, found = document.content, []
    for key in ("fp16", "bf16"):
        if content.get(key) is not None:
            reading = read_precision_word(key, content[key])
            found.append(document.setting(key, content[key], reading.means).read_as(reading))
    told = [key for key in _TELLS_NOTHING if content.get(key) is not None]
    found += [document.setting(key, content[key], _TELLS_NOTHING[key]) for key in told]
    named = [str(content[key]) for key in ("deepspeed", "fsdp_config") if isinstance(content.get(key), str)]
    return SettingSource(
        "transformers", document.place, found, read_training_settings(document, "", content), names=named
    )
