#!/bin/sh
# Ansible dynamic inventory of a running lab; GPUCHANGE_LAB names it (default: lab).
exec "${GPUCHANGE_PYTHON:-python3}" -m gpuchange lab inventory "$@"
