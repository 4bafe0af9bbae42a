"""The compiled part of the package, of which setup.cfg cannot tell. All else about it is there."""

import platform

from setuptools import Extension, setup

CPU_KERNELS = Extension(
    "lockstep_cpu",
    ["srt/kernels/cpu.c", "srt/kernels/cpu_attention.c", "srt/kernels/cpu_team.c"],
    depends=["srt/kernels/cpu.h"],
    extra_compile_args=["-O3", "-mavx2", "-mfma", "-mf16c", "-fopenmp", "-fno-math-errno"],
    extra_link_args=["-fopenmp"],
    optional=True,  # without a C compiler everything works, only slower
)

setup(ext_modules=[CPU_KERNELS] if platform.machine() == "x86_64" else [])
