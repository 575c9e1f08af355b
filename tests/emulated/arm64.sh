#!/bin/bash
# Runs the kernel tests on an emulated Arm processor that has every extension qemu knows (SDOT and UDOT among them).
#
#   tests/emulated/arm64.sh WORK [argument of pytest ...]    # without arguments: tests/kernels
#   SOURCE=/other/checkout tests/emulated/arm64.sh WORK ...
#
# WORK is a folder for 1.2 GB: an arm64 root of Debian 12, the wheels and the build. What is there is used again; the
# extension is built anew from SOURCE. From Debian: qemu-user-static g++-aarch64-linux-gnu mmdebstrap cmake ninja-build;
# python3.11 with pip and nanobind comes first in PATH. Needs Linux 6.7 (binfmt_misc in user namespaces).
# On a Zen 3, preparing and building take two minutes and all kernel tests ten.
set -euo pipefail

work=$(realpath -m "${1:?give a work folder}")
shift
source=$(realpath "${SOURCE:-$(dirname "$0")/../..}")
root=$work/arm64-root
mkdir -p "$work"

if [ ! -e "$root/packages/ready" ]; then
    rm -rf "$root" && mkdir -p "$root"
    mmdebstrap --variant=extract --architectures=arm64 --include=python3,libpython3-dev,libstdc++6 bookworm - |
        tar -x -C "$root" --no-same-owner --exclude=./dev
    # Without dependencies: pip would choose them for this machine. torch 2.10 is the last whose wheel is without CUDA.
    python -m pip install --quiet --no-deps --only-binary=:all: --python-version 3.11 --target "$root/packages" \
        --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux2014_aarch64 \
        torch==2.10.0 numpy hypothesis pytest iniconfig pluggy packaging pygments sortedcontainers \
        filelock typing-extensions sympy mpmath networkx jinja2 markupsafe fsspec
    mkdir -p "$root"/{proc,sys,dev,tmp}
    touch "$root/packages/ready"
fi

cmake --fresh -S "$source" -B "$work/arm64-build" -G Ninja -DALULA_IN_PLACE="$work/arm64-native" \
    -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
    -DCMAKE_CXX_FLAGS="-idirafter $root/usr/include" -DPython_EXECUTABLE="$(command -v python)" \
    -DPython_INCLUDE_DIR="$root/usr/include/python3.11" -DSKBUILD_SOABI=cpython-311-aarch64-linux-gnu \
    >"$work/arm64-build.log"
ninja -C "$work/arm64-build"

rm -rf "$root/alula" && mkdir "$root/alula"
tar -c -C "$source" --exclude='_native.*' --exclude=__pycache__ src tests benchmarks pyproject.toml |
    tar -x -C "$root/alula"
cp "$work"/arm64-native/_native.*-aarch64-linux-gnu.so "$root/alula/src/alula/kernels/"

# In a namespace of its own, so that arm64 programs (and those they start) run there and nothing changes here.
# shellcheck disable=SC2016
exec unshare --map-root-user --mount bash -euc '
    mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
    cat /usr/lib/binfmt.d/qemu-aarch64.conf >/proc/sys/fs/binfmt_misc/register
    for folder in proc sys dev; do mount --rbind /$folder "$0/$folder"; done
    exec env -i PATH="$PATH" LANG=C.UTF-8 HOME=/tmp QEMU_CPU=max \
        PYTHONPATH=/packages:/alula/src ${ALULA_CPU_LEVEL:+ALULA_CPU_LEVEL="$ALULA_CPU_LEVEL"} \
        unshare --root="$0" --wd=/alula /usr/bin/python3 -m pytest -p no:cacheprovider "$@"
' "$root" "${@:-tests/kernels}" </dev/null
