"""L4, each rank: what is done to the executor beside serving: traces of its work, and other weights for its model."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from srt.executor.weights import iterate_weights
from srt.model_files import ModelFiles
from srt.models.llama import LlamaForCausalLM
from srt.models.loader import fill
from srt.parallel import Ranks

log = logging.getLogger(__name__)

MOST_TOLD = 300
"""Characters of a fault that other ranks hear: in JSON a character takes up to 12 bytes, and all of it has a page."""

Weights = Iterable[tuple[str, torch.Tensor]]


class ModelMaintenance:
    def __init__(
        self,
        model: LlamaForCausalLM,
        files: ModelFiles,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks | None,
        name: str,
        make_model: Callable[[Weights], LlamaForCausalLM],
        swap: Callable[[LlamaForCausalLM], None],
    ) -> None:
        """`name` is this rank's. A GPU's model is filled where it is, a CPU's made anew and given to `swap`."""
        self._model = model
        self._files = self._files_before = files
        self._dtype = dtype
        self._device = device
        self._ranks = ranks
        self._name = name
        self._make_model = make_model
        self._swap = swap
        self._profile: torch.profiler.profile | None = None
        self._trace = Path()
        self._steps_left = 0

    # ---- profiles --------------------------------------------------------------------------------------------------

    def step(self) -> None:
        if self._profile is not None:
            self._steps_left -= 1
            if self._steps_left == 0:
                self.stop_profile()

    def start_profile(self, folder: str, num_steps: int) -> str:
        if self._profile is not None:
            return "A profile is being made already."
        self._trace = Path(folder) / f"{self._name.replace(' ', '-')}.trace.json.gz"
        self._steps_left = num_steps
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()
        return self._agreed("")

    def stop_profile(self) -> str:
        if self._profile is None:
            return "No profile is being made."
        profile, self._profile, fault = self._profile, None, ""
        profile.stop()
        try:
            self._trace.parent.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(self._trace))
            log.info("profile written to %s", self._trace)
        except (OSError, RuntimeError) as error:
            log.error("the profile could not be written to %s: %s", self._trace, error)
            fault = f"The profile of {self._name} could not be written: {error}"
        return self._agreed(fault)

    # ---- weights ---------------------------------------------------------------------------------------------------

    def update_weights(self, folder: str | None) -> str:
        """`folder` has safetensors of the model's shapes; without one those before the last update come back.

        If any rank cannot read its own, all keep what they have.
        """
        if folder is None:
            files = self._files_before
        else:
            files = dataclasses.replace(self._files, folder=Path(folder), weights="safetensors", gguf_path=None)
        model, fault = self._model, ""
        try:
            model = self._loaded(files)
        except Exception as error:  # of a file or of memory, by any library: the others must hear of it
            fault = f"{self._name}: {error}"
        fault = self._agreed(fault)
        if fault:
            if self._device.type == "cuda":
                self._loaded(self._files)
                self._agreed("")
            log.error("the weights of %s were not taken: %s", files.folder, fault)
            return f"The weights were not taken: {fault}"
        self._files, self._files_before, self._model = files, self._files, model
        self._swap(model)
        log.info("the weights are those of %s", files.folder)
        return ""

    def _loaded(self, files: ModelFiles) -> LlamaForCausalLM:
        """With the files' weights. Captured graphs know where a GPU's weights lie, and there is no room for others."""
        weights = iterate_weights(files, self._dtype, device=self._device)
        if self._device.type != "cuda":
            return self._make_model(weights)
        with torch.inference_mode():
            fill(self._model, files.model_config, weights)
        torch.cuda.synchronize(self._device)
        return self._model

    # ---- ranks -----------------------------------------------------------------------------------------------------

    def _agreed(self, fault: str) -> str:
        """The first rank's that has one. Whoever is done sooner waits here: a step further on the others would seem to
        hang."""
        if self._ranks is None:
            return fault
        said = self._ranks.gather({"fault": fault[:MOST_TOLD]})
        return next(filter(None, (rank["fault"] for rank in said)), "")
