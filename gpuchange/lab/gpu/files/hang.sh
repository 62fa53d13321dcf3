if [ "$1" = configure ] && [ -p /etc/gpuchange-lab/faults/apt-hangs ]; then
    printf '%s: keep the local configuration? [y/N] ' "$PACKAGE"
    read -r answer < /etc/gpuchange-lab/faults/apt-hangs
fi
