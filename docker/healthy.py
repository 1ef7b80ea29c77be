"""Exits with 0 if the gRPC health service at the address on the command line says SERVING."""

import sys

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

with grpc.insecure_channel(sys.argv[1]) as channel:
    reply = HealthStub(channel).Check(HealthCheckRequest(), timeout=5.0)
sys.exit(reply.status != HealthCheckResponse.SERVING)
