case "$1" in remove|upgrade|deconfigure) dkms remove -m nvidia -v "@UPSTREAM@" --all || true ;; esac
