#!/usr/bin/env bash
# Installs protoc and the Go generators and prints their folder.
. "${BASH_SOURCE[0]%/*}/lib.sh"

protoc=1.85.1 # of grpcio-tools, the wheel that protoc comes in
go=1.36.12
grpc=1.6.2

build() {
  apt_need python3=python3 pip3=python3-pip
  pip3 install -q --target "$1/python" "grpcio-tools==$protoc"
  GOBIN=$1 go install "google.golang.org/protobuf/cmd/protoc-gen-go@v$go"
  GOBIN=$1 go install "google.golang.org/grpc/cmd/protoc-gen-go-grpc@v$grpc"
  printf '#!/bin/sh\nPYTHONPATH=%s/python exec python3 -m grpc_tools.protoc "$@"\n' '"${0%/*}"' >"$1/protoc"
  chmod +x "$1/protoc"
}

cached protobuf "$protoc-$go-$grpc"
echo "$dir"
