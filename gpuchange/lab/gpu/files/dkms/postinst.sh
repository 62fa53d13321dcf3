if [ "$1" = configure ]; then
    dkms add -m nvidia -v "@UPSTREAM@" || true
    for kernel in /lib/modules/*/build; do
        kernel=${kernel%/build}
        dkms install -m nvidia -v "@UPSTREAM@" -k "${kernel##*/}" \
            || echo "nvidia-dkms: no nvidia module for kernel ${kernel##*/}, see /var/lib/dkms/nvidia/@UPSTREAM@/build/make.log" >&2
    done
fi
