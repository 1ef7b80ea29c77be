#!/bin/sh
# tests/harness/debian_base_image.sh TAG PYTHON: an image to stand in for python:3.11-slim where none can be
# pulled. Debian's own packages bring Python 3.11 (debootstrap); what PYTHON's environment has
# installed is copied into it, so that the Dockerfile's `pip install` finds everything there and
# needs no network. PYTHON must be a 3.11 as well. Needs root, debootstrap, Debian's archive.
set -eu
tag=$1 python=$2
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
root=$work/root
debootstrap --variant=minbase \
  --include=python3,python3-distutils,ca-certificates,passwd bookworm "$root" >"$work/log" 2>&1 \
  || { tail -5 "$work/log"; exit 1; }
rm -rf "$root/var/cache/apt" "$root/var/lib/apt/lists" "$root"/usr/lib/python3.11/EXTERNALLY-MANAGED \
  "$root"/usr/share/doc "$root"/usr/share/zoneinfo "$root"/usr/share/locale "$root"/usr/share/man
ln -s python3 "$root/usr/bin/python"
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
scripts=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
# The commands that pip wrote for PYTHON, for the image's interpreter.
for name in flwr flwr-serverapp flwr-clientapp flwr-simulation flower-superlink flower-supernode \
    flower-superexec; do
  sed '1s|.*|#!/usr/bin/python3|' "$scripts/$name" > "$root/usr/local/bin/$name"
  chmod 755 "$root/usr/local/bin/$name"
done
# Hard links where the file system allows: the installed packages are gigabytes.
target=$root/usr/local/lib/python3.11/dist-packages
rm -rf "$target"
cp -al "$site" "$target" 2>/dev/null || { rm -rf "$target"; cp -a "$site" "$target"; }
# What no program here needs stays behind: an engine may walk through every file, and copy every
# byte, for each step of a build.
rm -rf "$target"/*blackthorn* "$target"/triton "$target"/torch/include \
  "$target"/ruff "$target"/mypy "$target"/mypyc "$target"/uv \
  "$target"/grpc_tools "$target"/tensorboard_data_server "$target"/ray
find "$target" -depth \( -name tests -o -name include \) -type d \
  ! -path '*/torch/*' ! -path '*/numpy/*' -exec rm -rf {} +
# Of the files with such names only the largest is mypy's own.
find "$target" -maxdepth 1 -name '*__mypyc*.so' -size +9M -delete
find "$target" -type f \( -name '*.pyi' -o -name '*.a' \) -delete
"$python" "$here/cuda_stand_ins.py" "$target"
tar -C "$root" --owner=0 --group=0 --create . | docker import \
  --change 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' - "$tag" >/dev/null
