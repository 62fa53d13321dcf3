#! /bin/sh
CRCsum=@CRC@
MD5=@MD5@
skip=@SKIP@
label="NVIDIA Accelerated Graphics Driver for Linux-@ARCH@ @VERSION@"
version_string=@VERSION@
pkg_version=1
script=./nvidia-installer
targetdir="NVIDIA-Linux-@ARCH@-@VERSION@"
TMPROOT=${TMPDIR:=/tmp}
TARGET_OS="Linux"
TARGET_ARCH="@ARCH@"

# Self-extracting driver of the lab: the options, messages and exit codes of NVIDIA's .run files, around stand-in files.

case $1 in
    -h|--help|-A|--advanced-options)
        echo "--info --check -x, --extract-only --target [NewDirectory] --tmpdir [Directory]"
        echo "The following arguments will be passed on to the ./nvidia-installer utility:"
        echo "  -s, --silent  -q, --no-questions  --ui=UI  --uninstall  --dkms, --no-dkms  --skip-module-load"
        echo "  --kernel-module-type=KERNEL-MODULE-TYPE  --allow-installation-with-running-driver  --skip-module-unload"
        exit 0 ;;
    --label) echo "$label"; exit 0 ;;
    --version-string) echo "$version_string"; exit 0 ;;
    --info)
        echo
        echo "  Identification    : $label"
        echo "  Target directory  : $targetdir"
        echo "  Uncompressed size : @KIB@ KB"
        echo "  Compression       : gzip"
        echo "  Application run after extraction : $script "
        exit 0 ;;
    --check)
        sum1=$(tail -n +4 "$0" | cksum | awk '{print $1}')
        [ "$sum1" = "$CRCsum" ] || { echo "Error in checksums $sum1 $CRCsum"; exit 2; }
        md5sum=$(tail -n +4 "$0" | md5sum | cut -b-32)
        [ "$md5sum" = "$MD5" ] || { echo "Error in md5 sums $md5sum $MD5"; exit 2; }
        echo "check sums and md5 sums are ok"
        exit 0 ;;
esac

run_script=y keep=n scriptargs=
while [ $# -gt 0 ]; do
    case $1 in
        -x|--extract-only) run_script=n keep=y ;;
        --keep) keep=y ;;
        --target) targetdir=$2 keep=y; shift ;;
        --tmpdir) TMPROOT=$2; shift ;;
        *) scriptargs="$scriptargs $1" ;;
    esac
    shift
done
[ "$(uname -m)" = "$TARGET_ARCH" ] || { echo "ERROR: this .run file is intended for Linux-$TARGET_ARCH"; exit 1; }
if [ $keep = y ]; then tmpdir=$targetdir; echo "Creating directory $targetdir"; else tmpdir=$TMPROOT/selfgz$$/$targetdir; fi
[ ! -e "$tmpdir" ] || { echo "The directory '$tmpdir' already exists."; exit 1; }
mkdir -p "$tmpdir" || exit 1
printf 'Verifying archive integrity... '
[ "$(tail -n +4 "$0" | cksum | awk '{print $1}')" = "$CRCsum" ] || { echo "Error in checksums"; exit 2; }
echo "OK"
echo "Uncompressing $label"
tail -n +$skip "$0" | gzip -dc | tar xf - -C "$tmpdir" || exit 1
res=0
if [ $run_script = y ]; then
    (cd "$tmpdir" && exec $script $scriptargs) || res=$?
fi
[ $keep = y ] || rm -rf "$TMPROOT/selfgz$$"
exit $res
