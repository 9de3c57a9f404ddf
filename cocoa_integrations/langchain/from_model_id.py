"""The arguments of ``from_model_id`` of langchain-huggingface as options of our constructors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typing_extensions import Self

from cocoa_engine.errors import ConfigError
from cocoa_engine.model.load_options import DeviceMap, LoadOptions
from cocoa_integrations._shared.load_options import one_model_name

BACKENDS = ("default", "pipeline")
TASKS = (None, "text-generation")


class FromModelId:
    """Adds ``from_model_id`` to a model."""

    @classmethod
    def from_model_id(
        cls,
        model_id: str,
        task: str | None = None,
        backend: str = "default",
        device: int | str | None = None,
        device_map: DeviceMap = "auto",
        model_kwargs: dict[str, Any] | None = None,
        pipeline_kwargs: dict[str, Any] | None = None,
        batch_size: int | None = None,
        **options: Any,
    ) -> Self:
        """The model, with the arguments of the constructor that ``langchain-huggingface`` has.

        Args:
            model_id: as ``model`` of the constructor.
            task: ``"text-generation"``.
            backend: ``"default"`` (or ``"pipeline"``): transformers with PyTorch.
            device: a number of a GPU, -1 for the CPU, or a device such as ``"cuda:0"``. The default is that of
                ``device_map``.
            device_map: as for the constructor.
            model_kwargs: as for the constructor. ``dtype`` and ``trust_remote_code`` may be among them.
            pipeline_kwargs: decode settings such as ``max_new_tokens``, under the names of transformers.
            batch_size: as for the constructor of :class:`CocoaLLM`. A chat model has no such option.
            **options: further options of the constructor.

        Raises:
            ConfigError: an option is unknown, out of range or not supported.
        """
        one_model_name(options, model_id=model_id)
        return cls(
            **_options_of_model_id(
                cls.__name__,
                {"model_kwargs": model_kwargs, "batch_size": batch_size, **options},
                task=task,
                backend=backend,
                device=device,
                device_map=device_map,
                pipeline_kwargs=pipeline_kwargs,
            )
        )


def _options_of_model_id(
    what: str,
    options: Mapping[str, Any],
    *,
    task: str | None,
    backend: str,
    device: int | str | None,
    device_map: DeviceMap,
    pipeline_kwargs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The options of the constructor.

    Args:
        what: the name of the class.
        options: options that the constructor has under the same name; ``None`` counts as not given.
        task, backend, device, device_map, pipeline_kwargs: the arguments of ``from_model_id``.

    Raises:
        ConfigError: an argument asks for something that is not supported, or two of them contradict each other.
    """
    name = f"{what}.from_model_id"
    if task not in TASKS:
        raise ConfigError(f"{name}: task={task!r} is not supported; only 'text-generation' is")
    if backend not in BACKENDS:
        raise ConfigError(f"{name}: backend={backend!r} is not supported; models run in transformers with PyTorch")
    if device is not None and device_map not in ("auto", None):
        raise ConfigError(f"{name}: device and device_map are both given; give device_map alone")
    result = {name: value for name, value in options.items() if value is not None}
    if device is not None:
        result["device_map"] = _device(device)
    else:
        result["device_map"] = device_map
    # from_pretrained takes these under model_kwargs too; here they are options
    model_kwargs = dict(result.pop("model_kwargs", {}))
    if "torch_dtype" in model_kwargs:
        model_kwargs.setdefault("dtype", model_kwargs.pop("torch_dtype"))
    own = {key: model_kwargs.pop(key) for key in (*LoadOptions.model_fields,) if key in model_kwargs}
    decode = {key: value for key, value in (pipeline_kwargs or {}).items() if value is not None}
    if decode.pop("return_full_text", False):
        raise ConfigError(f"{name}: return_full_text=True is not supported; answers do not repeat the prompt")
    if decode.get("do_sample") is False:
        decode |= {"temperature": 0.0}
    elif decode.get("do_sample"):
        decode.setdefault("temperature", 1.0)
    decode.pop("do_sample", None)
    groups = (("the arguments", result), ("model_kwargs", own), ("pipeline_kwargs", decode))
    merged: dict[str, Any] = {"model_kwargs": model_kwargs} if model_kwargs else {}
    for group, values in groups:
        if twice := merged.keys() & values.keys():
            raise ConfigError(f"{name}: {', '.join(sorted(twice))} is given in {group} and elsewhere too")
        merged |= values
    return merged


def _device(device: int | str) -> str:
    """The device of transformers' pipeline: a number of a GPU, -1 for the CPU, or a name."""
    if isinstance(device, str):
        return device
    return "cpu" if device < 0 else f"cuda:{device}"
