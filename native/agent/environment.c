/* The environment of commands: the agent's own, over it what was bound, over it the command's. */
#include "agent.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NAMES_MAX 2048 /* every name is compared with every other */

extern char **environ;

static char **bound;
static size_t bound_count;

static size_t count_of(char *const *list)
{
    size_t count = 0;
    while (list != NULL && list[count] != NULL)
        count++;
    return count;
}

static bool same_name(const char *left, const char *right)
{
    size_t size = strcspn(left, "=");
    return strncmp(left, right, size) == 0 && (right[size] == '=' || right[size] == 0);
}

/* Adds every entry whose name is not there yet; the last of a list wins. */
static size_t add(char **result, size_t size, char *const *entries, size_t count)
{
    for (size_t i = count; i-- > 0;) {
        bool known = false;
        for (size_t j = 0; j < size && !known; j++)
            known = same_name(entries[i], result[j]);
        if (!known)
            result[size++] = entries[i];
    }
    return size;
}

char **environment_build(char *const *own, size_t own_count)
{
    size_t base_count = count_of(environ);
    if (own_count > NAMES_MAX || base_count > NAMES_MAX) {
        errno = E2BIG;
        return NULL;
    }
    char **result = malloc((own_count + bound_count + base_count + 1) * sizeof *result);
    if (result == NULL) {
        errno = ENOMEM;
        return NULL;
    }
    size_t size = add(result, 0, own, own_count);
    size = add(result, size, bound, bound_count);
    size = add(result, size, environ, base_count);
    result[size] = NULL;
    return result;
}

bool environment_bind(char **entries, size_t count)
{
    for (size_t i = 0; i < bound_count; i++)
        free(bound[i]);
    free(bound);
    bound = entries;
    bound_count = count;
    return true;
}
