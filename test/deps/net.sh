#!/usr/bin/env bash
# Installs what makes network namespaces, links and packet filters, for
# test/netfaults. Prints nothing: the tools are on the PATH.
. "${BASH_SOURCE[0]%/*}/lib.sh"

apt_need ip=iproute2 nft=nftables unshare=util-linux
