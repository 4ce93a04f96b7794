#include "network.h"
#include "sys.h"

#include <arpa/inet.h>
#include <errno.h>
#include <linux/netfilter.h>
#include <linux/netfilter/nf_tables.h>
#include <linux/netfilter/nfnetlink.h>
#include <linux/netlink.h>
#include <linux/nsfs.h>
#include <linux/rtnetlink.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>

/* Built by hand, since no library is linked in: a buffer of netlink messages. What does not fit sets `full`. */
struct batch {
    _Alignas(8) uint8_t data[32768];
    size_t size;
    struct nlmsghdr *message;
    uint32_t sequence;
    int full;
};

static void *append(struct batch *batch, size_t size)
{
    size_t room = NLMSG_ALIGN(size);
    if (batch->full || sizeof batch->data - batch->size < room) {
        batch->full = 1;
        return NULL;
    }
    void *at = batch->data + batch->size;
    memset(at, 0, room);
    batch->size += room;
    return at;
}

static void begin(struct batch *batch, unsigned type, unsigned flags, const void *head, size_t size)
{
    batch->message = append(batch, NLMSG_HDRLEN);
    void *body = append(batch, size);
    if (batch->full)
        return;
    batch->message->nlmsg_type = (uint16_t)type;
    batch->message->nlmsg_flags = (uint16_t)(NLM_F_REQUEST | flags);
    batch->message->nlmsg_seq = ++batch->sequence;
    memcpy(body, head, size);
}

static void finish(struct batch *batch)
{
    if (!batch->full)
        batch->message->nlmsg_len = (uint32_t)(batch->data + batch->size - (uint8_t *)batch->message);
}

static void attribute(struct batch *batch, unsigned type, const void *data, size_t size)
{
    struct nlattr *head = append(batch, NLA_HDRLEN + size);
    if (batch->full)
        return;
    head->nla_type = (uint16_t)type;
    head->nla_len = (uint16_t)(NLA_HDRLEN + size);
    memcpy((uint8_t *)head + NLA_HDRLEN, data, size);
}

static void text(struct batch *batch, unsigned type, const char *value) { attribute(batch, type, value, strlen(value) + 1); }

static void number(struct batch *batch, unsigned type, uint32_t value)
{
    uint32_t wire = htonl(value);
    attribute(batch, type, &wire, sizeof wire);
}

static size_t nest(struct batch *batch, unsigned type)
{
    size_t at = batch->size;
    attribute(batch, type | NLA_F_NESTED, "", 0);
    return at;
}

static void unnest(struct batch *batch, size_t at)
{
    if (!batch->full)
        ((struct nlattr *)(void *)(batch->data + at))->nla_len = (uint16_t)(batch->size - at);
}

/* Sends it all; the first errno that any message of it was answered with. `answers` are waited for. */
static int send_batch(struct batch *batch, int protocol, unsigned answers)
{
    _Alignas(8) uint8_t reply[8192];
    struct sockaddr_nl kernel = {.nl_family = AF_NETLINK};
    int error = 0, fd = batch->full ? -1 : socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, protocol);
    if (batch->full)
        return ENOBUFS;
    if (fd < 0)
        return errno;
    if (sendto(fd, batch->data, batch->size, 0, (struct sockaddr *)&kernel, sizeof kernel) < 0)
        error = errno;
    while (!error && answers) {
        ssize_t got = recv(fd, reply, sizeof reply, 0);
        if (got < 0 && errno != EINTR)
            error = errno;
        size_t left = got < 0 ? 0 : (size_t)got;
        for (uint8_t *at = reply; !error && answers && left >= NLMSG_HDRLEN;) {
            const struct nlmsghdr *head = (const struct nlmsghdr *)(const void *)at;
            size_t size = NLMSG_ALIGN(head->nlmsg_len);
            if (head->nlmsg_len < NLMSG_HDRLEN || size > left)
                break;
            if (head->nlmsg_type == NLMSG_ERROR && head->nlmsg_len >= NLMSG_HDRLEN + sizeof(struct nlmsgerr)) {
                error = -((const struct nlmsgerr *)(const void *)(at + NLMSG_HDRLEN))->error;
                answers--;
            }
            at += size;
            left -= size;
        }
    }
    close(fd);
    return error;
}

/* Everything that has no route of its own leaves through loopback: there it is caught. */
static int add_route(void)
{
    struct batch batch = {.size = 0};
    struct rtmsg route = {.rtm_family = AF_INET, .rtm_table = RT_TABLE_MAIN, .rtm_protocol = RTPROT_STATIC,
                          .rtm_scope = RT_SCOPE_LINK, .rtm_type = RTN_UNICAST};
    uint32_t loopback = 1, source = htonl(INADDR_LOOPBACK); /* lo is number 1 in every namespace */
    begin(&batch, RTM_NEWROUTE, NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE, &route, sizeof route);
    attribute(&batch, RTA_OIF, &loopback, sizeof loopback);
    attribute(&batch, RTA_PREFSRC, &source, sizeof source);
    finish(&batch);
    return send_batch(&batch, NETLINK_ROUTE, 1);
}

#define TABLE "ringfence"

static void nft(struct batch *batch, unsigned type, unsigned flags)
{
    struct nfgenmsg head = {.nfgen_family = NFPROTO_IPV4, .version = NFNETLINK_V0};
    begin(batch, NFNL_SUBSYS_NFTABLES << 8 | type, flags, &head, sizeof head);
}

static void mark(struct batch *batch, unsigned type)
{
    struct nfgenmsg head = {.version = NFNETLINK_V0, .res_id = htons(NFNL_SUBSYS_NFTABLES)};
    begin(batch, type, 0, &head, sizeof head);
    finish(batch);
}

static void chain(struct batch *batch, const char *name, const char *kind, int priority, uint32_t policy)
{
    nft(batch, NFT_MSG_NEWCHAIN, NLM_F_CREATE | NLM_F_ACK);
    text(batch, NFTA_CHAIN_TABLE, TABLE);
    text(batch, NFTA_CHAIN_NAME, name);
    size_t hook = nest(batch, NFTA_CHAIN_HOOK);
    number(batch, NFTA_HOOK_HOOKNUM, NF_INET_LOCAL_OUT);
    number(batch, NFTA_HOOK_PRIORITY, (uint32_t)priority);
    unnest(batch, hook);
    number(batch, NFTA_CHAIN_POLICY, policy);
    text(batch, NFTA_CHAIN_TYPE, kind);
    finish(batch);
}

struct nested {
    size_t element, data;
};

static struct nested expression(struct batch *batch, const char *name)
{
    struct nested made = {.element = nest(batch, NFTA_LIST_ELEM)};
    text(batch, NFTA_EXPR_NAME, name);
    made.data = nest(batch, NFTA_EXPR_DATA);
    return made;
}

static void expressed(struct batch *batch, struct nested made)
{
    unnest(batch, made.data);
    unnest(batch, made.element);
}

static void value(struct batch *batch, unsigned type, const void *data, size_t size)
{
    size_t at = nest(batch, type);
    attribute(batch, NFTA_DATA_VALUE, data, size);
    unnest(batch, at);
}

static void meta(struct batch *batch, uint32_t key)
{
    struct nested made = expression(batch, "meta");
    number(batch, NFTA_META_DREG, NFT_REG_1);
    number(batch, NFTA_META_KEY, key);
    expressed(batch, made);
}

static void payload(struct batch *batch, uint32_t base, uint32_t offset, uint32_t size)
{
    struct nested made = expression(batch, "payload");
    number(batch, NFTA_PAYLOAD_DREG, NFT_REG_1);
    number(batch, NFTA_PAYLOAD_BASE, base);
    number(batch, NFTA_PAYLOAD_OFFSET, offset);
    number(batch, NFTA_PAYLOAD_LEN, size);
    expressed(batch, made);
}

static void masked(struct batch *batch, uint32_t mask)
{
    static const uint32_t zero;
    struct nested made = expression(batch, "bitwise");
    number(batch, NFTA_BITWISE_SREG, NFT_REG_1);
    number(batch, NFTA_BITWISE_DREG, NFT_REG_1);
    number(batch, NFTA_BITWISE_LEN, sizeof mask);
    value(batch, NFTA_BITWISE_MASK, &mask, sizeof mask);
    value(batch, NFTA_BITWISE_XOR, &zero, sizeof zero);
    expressed(batch, made);
}

static void compare(struct batch *batch, uint32_t how, const void *data, size_t size)
{
    struct nested made = expression(batch, "cmp");
    number(batch, NFTA_CMP_SREG, NFT_REG_1);
    number(batch, NFTA_CMP_OP, how);
    value(batch, NFTA_CMP_DATA, data, size);
    expressed(batch, made);
}

static void verdict(struct batch *batch, uint32_t code)
{
    struct nested made = expression(batch, "immediate");
    number(batch, NFTA_IMMEDIATE_DREG, NFT_REG_VERDICT);
    size_t data = nest(batch, NFTA_IMMEDIATE_DATA), inner = nest(batch, NFTA_DATA_VERDICT);
    number(batch, NFTA_VERDICT_CODE, code);
    unnest(batch, inner);
    unnest(batch, data);
    expressed(batch, made);
}

static void redirect(struct batch *batch, uint16_t port)
{
    uint16_t wire = htons(port);
    struct nested made = expression(batch, "immediate");
    number(batch, NFTA_IMMEDIATE_DREG, NFT_REG_1);
    value(batch, NFTA_IMMEDIATE_DATA, &wire, sizeof wire);
    expressed(batch, made);
    made = expression(batch, "redir");
    number(batch, NFTA_REDIR_REG_PROTO_MIN, NFT_REG_1);
    expressed(batch, made);
}

static size_t rule(struct batch *batch, const char *name)
{
    nft(batch, NFT_MSG_NEWRULE, NLM_F_CREATE | NLM_F_APPEND | NLM_F_ACK);
    text(batch, NFTA_RULE_TABLE, TABLE);
    text(batch, NFTA_RULE_CHAIN, name);
    return nest(batch, NFTA_RULE_EXPRESSIONS);
}

static void ruled(struct batch *batch, size_t list)
{
    unnest(batch, list);
    finish(batch);
}

static void to_address(struct batch *batch, uint32_t how, uint32_t address, uint32_t mask)
{
    payload(batch, NFT_PAYLOAD_NETWORK_HEADER, 16, 4);
    masked(batch, mask);
    compare(batch, how, &address, sizeof address);
}

static void to_port(struct batch *batch, uint16_t port)
{
    uint16_t wire = htons(port);
    payload(batch, NFT_PAYLOAD_TRANSPORT_HEADER, 2, 2);
    compare(batch, NFT_CMP_EQ, &wire, sizeof wire);
}

static void of_protocol(struct batch *batch, uint8_t protocol)
{
    meta(batch, NFT_META_L4PROTO);
    compare(batch, NFT_CMP_EQ, &protocol, sizeof protocol);
}

static void catch_all(struct batch *batch, uint16_t port, uint16_t dns)
{
    chain(batch, "catch", "nat", -100, NF_ACCEPT);
    for (int i = 0; i < 2; i++) {
        size_t list = rule(batch, "catch");
        of_protocol(batch, i ? IPPROTO_TCP : IPPROTO_UDP);
        to_port(batch, 53);
        redirect(batch, dns);
        ruled(batch, list);
    }
    size_t list = rule(batch, "catch");
    of_protocol(batch, IPPROTO_TCP);
    to_address(batch, NFT_CMP_NEQ, htonl(INADDR_LOOPBACK & IN_CLASSA_NET), htonl(IN_CLASSA_NET));
    redirect(batch, port);
    ruled(batch, list);
}

static void drop_or_pass(struct batch *batch, const struct net_rule *line)
{
    size_t list = rule(batch, "leave");
    to_address(batch, NFT_CMP_EQ, line->address & line->mask, line->mask);
    if (line->port)
        to_port(batch, ntohs(line->port));
    verdict(batch, line->pass ? NF_ACCEPT : NF_DROP);
    ruled(batch, list);
}

int network_guard(uint16_t port, uint16_t dns, const struct net_rule *rules, unsigned count)
{
    static struct batch batch;
    const struct net_rule own = {.address = htonl(INADDR_LOOPBACK), .mask = htonl(IN_CLASSA_NET), .pass = 1};
    if (count > NET_RULES_MAX)
        return E2BIG;
    int error = port ? add_route() : 0;
    if (error)
        return error;
    memset(&batch, 0, sizeof batch);
    mark(&batch, NFNL_MSG_BATCH_BEGIN);
    nft(&batch, NFT_MSG_NEWTABLE, NLM_F_CREATE | NLM_F_ACK);
    text(&batch, NFTA_TABLE_NAME, TABLE);
    finish(&batch);
    if (port)
        catch_all(&batch, port, dns);
    chain(&batch, "leave", "filter", 0, port ? NF_DROP : NF_ACCEPT);
    drop_or_pass(&batch, &own);
    for (unsigned i = 0; i < count; i++)
        drop_or_pass(&batch, &rules[i]);
    unsigned answers = batch.sequence - 1; /* all but the first mark ask for one */
    mark(&batch, NFNL_MSG_BATCH_END);
    return send_batch(&batch, NETLINK_NETFILTER, answers);
}

int network_guard_step(uint64_t port, uint64_t dns, const uint8_t *data, size_t length)
{
    static struct net_rule rules[NET_RULES_MAX];
    if (length % sizeof *rules || length > sizeof rules || port > UINT16_MAX || dns > UINT16_MAX || (port && !dns))
        return EPROTO;
    if (length)
        memcpy(rules, data, length);
    return network_guard((uint16_t)port, (uint16_t)dns, rules, (unsigned)(length / sizeof *rules));
}

int network_join(int fd)
{
    struct stat ours, owners;
    int owner = ioctl(fd, NS_GET_USERNS);
    if (owner < 0)
        return errno;
    int error = stat("/proc/self/ns/user", &ours) || fstat(owner, &owners) ? errno : 0;
    if (!error && (ours.st_ino != owners.st_ino || ours.st_dev != owners.st_dev))
        error = setns(owner, CLONE_NEWUSER) ? errno : 0;
    close(owner);
    if (!error)
        error = setns(fd, CLONE_NEWNET) ? errno : 0;
    return error;
}
