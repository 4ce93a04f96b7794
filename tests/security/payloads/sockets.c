/* Kinds of sockets that untrusted code has no use for, or that reach past the network namespace. */
#include "verdict.h"
#include <linux/netlink.h>
#include <linux/if_ether.h>
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

int main(int argc, char **argv) {
    if (IS("raw")) call(socket(AF_INET, SOCK_RAW, IPPROTO_ICMP));
    if (IS("raw6")) call(socket(AF_INET6, SOCK_RAW, 58));
    if (IS("packet")) call(socket(AF_PACKET, SOCK_RAW, htons(ETH_P_ALL)));
    if (IS("packet-dgram")) call(socket(AF_PACKET, SOCK_DGRAM, htons(ETH_P_ALL)));
    if (IS("vsock")) call(socket(40, SOCK_STREAM, 0));
    if (IS("alg")) call(socket(38, SOCK_SEQPACKET, 0));
    if (IS("key")) call(socket(15, SOCK_RAW, 2));
    if (IS("netfilter")) call(socket(AF_NETLINK, SOCK_RAW, NETLINK_NETFILTER));
    if (IS("xfrm")) call(socket(AF_NETLINK, SOCK_RAW, NETLINK_XFRM));
    if (IS("audit")) call(socket(AF_NETLINK, SOCK_RAW, NETLINK_AUDIT));
    if (IS("uevent")) call(socket(AF_NETLINK, SOCK_RAW, NETLINK_KOBJECT_UEVENT));
    if (IS("xdp")) call(socket(44, SOCK_RAW, 0));
    if (IS("high-family")) { /* the filter sees 64 bits, the kernel takes 32 */
        call(syscall(SYS_socket, (1ul << 32) | AF_PACKET, SOCK_RAW, htons(ETH_P_ALL)));
    }
    usage();
}
