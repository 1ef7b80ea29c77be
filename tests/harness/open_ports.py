"""A program that prints which ports of a host answer, for other hosts and containers to run."""

# python -c OPEN_PORTS HOST PORT ...
OPEN_PORTS = """
import socket, sys
for port in map(int, sys.argv[2:]):
    try:
        socket.create_connection((sys.argv[1], port), timeout=3).close()
        print(port)
    except OSError:
        pass
"""
