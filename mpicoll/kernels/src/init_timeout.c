/* The timeout of MPI_Init. A process that waits in MPI_Init for missing ranks cannot run Python,
 * because MPI_Init holds the GIL. A thread in this function needs neither the GIL nor MPI. */

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "kernels.h"

/* Size of a write to a pipe that is atomic (PIPE_BUF). */
#define MAX_TEXT_BYTES 4096

/* Waits until a descriptor is readable. Returns 0 after the timeout. */
static int wait_readable(int descriptor, long long timeout_ms)
{
    struct pollfd one = {.fd = descriptor, .events = POLLIN};
    const long long most_ms = INT64_MAX / 1000000; /* 292 years */
    const uint64_t end =
        now_ns() + (uint64_t)(timeout_ms < most_ms ? timeout_ms : most_ms) * 1000000;
    for (;;) {
        const uint64_t now = now_ns(), left_ms = now < end ? (end - now) / 1000000 : 0;
        const int found = poll(&one, 1, left_ms > INT_MAX ? INT_MAX : (int)left_ms);
        if (found > 0 || (found < 0 && errno != EINTR))
            return 1; /* on an error: no timeout rather than a wrong one */
        if (found == 0 && left_ms <= INT_MAX)
            return 0;
    }
}

/* A rank of the job is running if a process holds its name, an abstract address of this node. */
static int is_running(const char *job, int rank)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const size_t room = sizeof address.sun_path - 1;
    int length = snprintf(address.sun_path + 1, room, "%s/%d", job, rank);
    int sock = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    int found = sock < 0 || length >= (int)room
        || connect(sock, (const struct sockaddr *)&address,
                   (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + length)) == 0;
    close(sock);
    return found;
}

/* Writes a byte to `begun`, then returns when `cancel` becomes readable. After the timeout, writes
 * `before`, the missing ranks out of 0 to size - 1, and `after` to standard error, and exits the
 * process with `code`. Without a `job` no ranks are listed. */
EXPORT void mpicoll_init_timeout(int begun, int cancel, long long timeout_ms, const char *before,
                                 const char *after, const char *job, int size, int code)
{
    (void)!write(begun, "", 1);
    if (wait_readable(cancel, timeout_ms))
        return;
    char text[MAX_TEXT_BYTES];
    const size_t limit = sizeof text - strlen(after) - 32; /* room for ", and others)" */
    size_t used = (size_t)snprintf(text, limit, "%s", before);
    used = used < limit ? used : limit - 1;
    const size_t start = used;
    for (int rank = 0; job != NULL && rank < size && used < limit; rank++)
        if (!is_running(job, rank)) {
            const char *comma = used == start ? " (missing: " : ", ";
            if (used + 16 + strlen(comma) > limit) {
                used += (size_t)sprintf(text + used, ", and others");
                break;
            }
            used += (size_t)sprintf(text + used, "%s%d", comma, rank);
        }
    used += (size_t)sprintf(text + used, "%s%s", used == start ? "" : ")", after);
    (void)!write(STDERR_FILENO, text, used);
    sleep(1); /* so that ranks that time out shortly afterwards still find this one running */
    _exit(code);
}
