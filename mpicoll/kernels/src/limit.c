/* A process that waits in MPI_Init for ranks that do not come runs no Python: MPI_Init keeps the
   interpreter's lock. A thread that is in here needs neither that lock nor MPI. */

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "kernels.h"

/* What is written to a pipe in one piece (PIPE_BUF). */
#define WHOLE 4096

/* Waits until there is something to read; false where nothing comes in so many milliseconds. */
static int readable(int descriptor, long long milliseconds)
{
    struct pollfd one = {.fd = descriptor, .events = POLLIN};
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    const long long start = now.tv_sec * 1000LL + now.tv_nsec / 1000000, end = start + milliseconds;
    for (long long left = milliseconds;;) {
        int found = poll(&one, 1, left > INT_MAX ? INT_MAX : (int)left);
        if (found > 0)
            return 1;
        if (found < 0 && errno != EINTR)
            return 1; /* better no limit than a wrong one */
        clock_gettime(CLOCK_MONOTONIC, &now);
        left = end - (now.tv_sec * 1000LL + now.tv_nsec / 1000000);
        if (left <= 0 && found == 0)
            return 0;
        left = left < 0 ? 0 : left;
    }
}

/* A rank of the job is there if a process holds its name, an abstract address of this node. */
static int is_there(const char *job, int rank)
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

/* Writes a byte to ``begun``. Returns once there is something to read at ``cancel``. Where nothing comes in so many
   milliseconds, writes ``before``, the ranks of 0 to size - 1 that are not there, and ``after`` to
   standard error, and ends the process with an exit code. Without a ``job`` that list is left out. */
EXPORT void mpicoll_limit(int begun, int cancel, long long milliseconds, const char *before, const char *after,
                          const char *job, int size, int code)
{
    (void)!write(begun, "", 1);
    if (readable(cancel, milliseconds))
        return;
    char text[WHOLE];
    const size_t most = sizeof text - strlen(after) - 32; /* room for ", and others)" */
    size_t used = (size_t)snprintf(text, most, "%s", before);
    used = used < most ? used : most - 1;
    const size_t start = used;
    for (int rank = 0; job != NULL && rank < size && used < most; rank++)
        if (!is_there(job, rank)) {
            const char *comma = used == start ? " (missing: " : ", ";
            if (used + 16 + strlen(comma) > most) {
                used += (size_t)sprintf(text + used, ", and others");
                break;
            }
            used += (size_t)sprintf(text + used, "%s%d", comma, rank);
        }
    used += (size_t)sprintf(text + used, "%s%s", used == start ? "" : ")", after);
    (void)!write(STDERR_FILENO, text, used);
    sleep(1); /* ranks whose time ends soon after find this one still there */
    _exit(code);
}
