#!/bin/bash
# Runs the kernel tests in Bochs, on an emulated x86-64 processor with AVX-512 and its VNNI instructions.
#
#   tests/emulated/avx512.sh WORK [argument of pytest ...]    # without arguments: levels agree, and GGUF blocks
#   SOURCE=/other/checkout tests/emulated/avx512.sh WORK ...
#
# WORK is a folder for 3 GB. What is there is used again; the extension is built anew from SOURCE. From Debian 12: bochs
# (for its BIOS) mmdebstrap isolinux syslinux-common xorriso busybox-static cpio e2fsprogs g++ make cmake ninja-build;
# python3.11 with pip's packages of the project (torch without CUDA) comes first in PATH. Bochs must be 3.0, better
# without the debugger of Debian's: unpack its source (`apt-get source bochs` in Debian 13) at WORK/bochs-3.0, or name a
# program in BOCHS. On a Zen 3 it makes 150 to 200 million instructions a second. The first run takes 5 minutes more.
set -euo pipefail

work=$(realpath -m "${1:?give a work folder}")
shift
here=$(realpath "$(dirname "$0")")
source=$(realpath "${SOURCE:-$here/../..}")
root=$work/amd64-root
bochs=${BOCHS:-$work/bochs-build/bochs}
mkdir -p "$work"
cd "$work"

if [ ! -x "$bochs" ]; then
    mkdir -p bochs-build
    (cd bochs-build && CXXFLAGS=-O3 CFLAGS=-O3 ../bochs-3.0/configure -q --with-nogui --enable-x86-64 \
        --enable-cpu-level=6 --enable-avx --enable-evex --enable-all-optimizations --enable-pci --enable-cdrom \
        --enable-memtype --enable-cet --enable-protection-keys --enable-long-phy-address --disable-docbook &&
        make -j"$(nproc)") >bochs-build.log 2>&1
fi

if [ ! -e disk.img ]; then
    rm -rf "$root" boot modules disk.new && mkdir -p "$root"
    include=dash,python3,libstdc++6,linux-image-cloud-amd64
    mmdebstrap --variant=extract --architectures=amd64 --include=$include bookworm - |
        tar -x -C "$root" --no-same-owner --exclude=./dev
    python "$here/copy_packages.py" "$root/packages" torch numpy hypothesis pytest
    mv "$root/boot" "$root/lib/modules" "$work/"
    mkdir -p "$root"/{proc,sys,dev,tmp,alula}
    truncate -s 2500M disk.new
    /sbin/mkfs.ext4 -q -m 0 -O ^has_journal -d "$root" disk.new
    mv disk.new disk.img
    rm -rf "$root"
fi

cmake --fresh -S "$source" -B amd64-build -G Ninja -DALULA_IN_PLACE="$work/amd64-native" >amd64-build.log
ninja -C amd64-build

# The project, the command and what the first process needs travel in the initial file system.
rm -rf first iso && mkdir -p first/{bin,proc,sys,dev,disk,alula,modules} iso
tar -c -C "$source" --exclude='_native.*' --exclude=__pycache__ src tests benchmarks pyproject.toml |
    tar -x -C first/alula
cp amd64-native/_native.*-x86_64-linux-gnu.so first/alula/src/alula/kernels/
cp "$(command -v busybox)" first/bin/
install "$here/init" first/init
for module in scsi_common scsi_mod libata ata_piix sd_mod; do
    find modules -name "$module.ko" -exec cp {} first/modules/ \;
done
[ $# -gt 0 ] || set -- tests/kernels/test_levels.py tests/kernels/test_blocks.py
{
    echo 'cd /alula; export PYTHONPATH=/packages:/alula/src HOME=/tmp LANG=C.UTF-8'
    printf '%q ' python3 -m pytest -p no:cacheprovider "$@"
} >first/alula/command
(cd first && find . | cpio -o -H newc --quiet | gzip -1) >iso/initrd.gz
cp boot/vmlinuz-* iso/vmlinuz
cp /usr/lib/ISOLINUX/isolinux.bin /usr/lib/syslinux/modules/bios/ldlinux.c32 "$here/isolinux.cfg" iso/
xorriso -as mkisofs -quiet -o boot.iso -b isolinux.bin -c boot.cat -no-emul-boot -boot-load-size 4 \
    -boot-info-table iso 2>/dev/null

rm -f serial.txt disk.img.lock
touch serial.txt
tail -n +1 -f serial.txt &
"$bochs" -q -f "$here/bochsrc" </dev/null >bochs.out 2>&1 &
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
wait $! || true  # powering off is a panic to Bochs
sleep 1
exit "$(sed -n 's/^exit status \([0-9]*\).*/\1/p' serial.txt | tail -n 1 | grep . || echo 1)"
