/* bind, quiesce, wake and shutdown. */
#include "agent.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

uint64_t epoch = 1;
uint8_t instance[16];

void control_start(void)
{
    if (getrandom(instance, sizeof instance, 0) != (ssize_t)sizeof instance) {
        uint64_t now = now_ns();
        memcpy(instance, &now, sizeof now);
    }
}
void control_bind(struct channel *channel, const uint8_t *fields, size_t size) { (void)fields; (void)size; channel_error(channel, ENOSYS, NULL); }
void control_quiesce(struct channel *channel, const uint8_t *fields, size_t size) { (void)fields; (void)size; channel_error(channel, ENOSYS, NULL); }
void control_shutdown(struct channel *channel, const uint8_t *fields, size_t size) { (void)fields; (void)size; channel_error(channel, ENOSYS, NULL); }
void control_wake(void) {}
void control_terminate(void) {}
void control_turn(void) {}
void worker_operation(struct channel *channel, const uint8_t *fields, size_t size) { (void)fields; (void)size; channel_error(channel, ENOSYS, NULL); }
void workers_turn(void) {}
void net_dial(struct channel *channel, const uint8_t *fields, size_t size) { (void)fields; (void)size; channel_error(channel, ENOSYS, NULL); }
void net_listen(struct channel *channel, const uint8_t *fields, size_t size) { (void)fields; (void)size; channel_error(channel, ENOSYS, NULL); }
