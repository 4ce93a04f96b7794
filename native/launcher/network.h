/* What a network namespace with no card lets out: nothing, or what is caught and handed to the guest agent. */
#ifndef RINGFENCE_NETWORK_H
#define RINGFENCE_NETWORK_H

#include <stddef.h>
#include <stdint.h>

/* One line of a filter: packets to these addresses (and port, unless 0) pass or are dropped. Network byte order. */
struct net_rule {
    uint32_t address, mask;
    uint16_t port, pass; /* pass: host byte order, 0 or 1 */
};

enum { NET_RULES_MAX = 128 };

/* Joins the network namespace behind `fd`, by way of the user namespace that owns it; 0 or errno. */
int network_join(int fd);

/* With a `port`: every TCP connection of this namespace that is not for its own loopback goes to that port of it,
 * every question to a DNS server (TCP and UDP port 53, loopback too) to `dns`, and all else is dropped.
 * With port 0: packets leave as the rules say, in order; those that no rule names leave. 0 or errno. */
int network_guard(uint16_t port, uint16_t dns, const struct net_rule *rules, unsigned count);

/* The same from a step's arguments, which are judged first. */
int network_guard_step(uint64_t port, uint64_t dns, const uint8_t *rules, size_t length);

#endif
