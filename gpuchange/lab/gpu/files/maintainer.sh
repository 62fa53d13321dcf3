#!/bin/sh
# Maintainer script of a lab package: a line in the package log, what a staged fault asks for, the package's own action.
set -e
PACKAGE="@PACKAGE@" VERSION="@VERSION@" SCRIPT="@SCRIPT@"
mkdir -p /var/log/gpuchange-lab
echo "$(date -u +%Y-%m-%dT%H:%M:%SZ) $PACKAGE $VERSION $SCRIPT $*" >> /var/log/gpuchange-lab/packages.log
@ACTION@
exit 0
