"""Settings of the caching allocator that torch refuses at the first use of CUDA."""

from __future__ import annotations

import pytest

from autotune.probing import JobServer
from autotune.step.jobs.build import refused_settings
from tests.virtual.alone import apart

ACCEPTED = [
    "expandable_segments:True",
    "max_split_size_mb:128, garbage_collection_threshold:0.8",
    "roundup_power2_divisions:[256:1,512:2,>:8],expandable_segments:False",
    "backend:cudaMallocAsync",
    "pinned_use_cuda_host_register:True,pinned_num_register_threads:8",
]
REFUSED = {
    "expandable_segment:True": "expandable_segment",
    "max_split_size_mb:128,max_split_size:1": "max_split_size",
    "max_split_size_mb=128": "max_split_size_mb=128",
    "expandable_segments:true": "Expected 'True'",
    "garbage_collection_threshold:80": "garbage_collect",
}


@pytest.mark.parametrize("settings", ACCEPTED)
def test_settings_of_the_installed_torch_are_accepted(settings: str, job_server: JobServer) -> None:
    assert apart(job_server, refused_settings, settings) == ""


@pytest.mark.parametrize("settings", REFUSED)
def test_a_setting_that_torch_refuses_is_named(settings: str, job_server: JobServer) -> None:
    assert REFUSED[settings] in str(apart(job_server, refused_settings, settings))
