"""Several engines at one stack process: the pool and its sessions, the clients' cores, and sockets without a kernel."""
