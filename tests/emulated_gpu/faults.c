/* Invalid accesses of running work.
 *
 * Freed memory and the pages beside each allocation cannot be accessed. A signal handler reports an
 * access and ends the work with CUDA's error. An access outside emulated work ends the process.
 */
#define _GNU_SOURCE
#include "device.h"

#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>
#include <unistd.h>

struct frame {
    sigjmp_buf buffer;
    struct frame *outer;
    const char *description;
};

/* The signals of faults, and the errors of work that raises them. */
static const struct {
    int number;
    cudaError_t error;
    const char *name;
} signals[] = {
    {SIGSEGV, cudaErrorIllegalAddress, "invalid access"},
    {SIGBUS, cudaErrorIllegalAddress, "access to memory that its process has freed"},
    {SIGILL, cudaErrorMisalignedAddress, "trap"},
    {SIGFPE, cudaErrorLaunchFailure, "arithmetic fault"},
};
#define SIGNAL_COUNT (sizeof signals / sizeof *signals)

static struct sigaction previous[SIGNAL_COUNT];
static _Thread_local struct frame *innermost;

void describe_work(const char *description)
{
    if (innermost)
        innermost->description = description;
}

void report_access(const char *access, const void *address)
{
    static const char *kinds[] = {"device", "managed", "stream-ordered", "pinned", "imported"};
    const struct allocation *found = nearest_allocation(address);
    const char *work = innermost ? innermost->description : NULL;
    char text[512];
    int length;

    length = snprintf(text, sizeof text, "emulated GPU: process %d, %s: %s at %p: ", getpid(),
                      work ? work : "a command", access, address);
    if (!found)
        length += snprintf(text + length, sizeof text - (size_t)length, "not device memory\n");
    else
        length += snprintf(text + length, sizeof text - (size_t)length,
                           "%s allocation %llu of device %d (%zu bytes at %p), offset %td%s\n",
                           kinds[found->kind], (unsigned long long)found->id, found->device,
                           found->bytes, (void *)found->address,
                           (const char *)address - found->address,
                           found->freed ? ", which was freed" : "");
    if (write(STDERR_FILENO, text, (size_t)length) < 0)
        return;
}

static void handle(int number, siginfo_t *info, void *context)
{
    const char *access;
    size_t k = 0;

    /* Python's faulthandler raises the signal again: return, and the access faults once more. */
    if (info->si_code <= 0 && innermost)
        return;
    while (signals[k].number != number)
        k++;
    access = signals[k].name;
#ifdef __x86_64__
    if (number == SIGSEGV && ((ucontext_t *)context)->uc_mcontext.gregs[REG_ERR] & 2)
        access = "invalid write";
#else
    (void)context;
#endif
    if (innermost || (number != SIGILL && nearest_allocation(info->si_addr)))
        report_access(access, info->si_addr);
    if (innermost)
        siglongjmp(innermost->buffer, (int)signals[k].error);
    sigaction(number, &previous[k], NULL);
    if (info->si_code <= 0)
        raise(number);
}

/* Install the handlers. Other libraries may have replaced them since the last call. */
static void install_handlers(void)
{
    struct sigaction now, wanted = {.sa_sigaction = handle,
                                    .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK};

    for (size_t k = 0; k < SIGNAL_COUNT; k++) {
        sigaction(signals[k].number, NULL, &now);
        if (now.sa_flags & SA_SIGINFO && now.sa_sigaction == handle)
            continue;
        previous[k] = now;
        sigaction(signals[k].number, &wanted, NULL);
    }
}

cudaError_t run_guarded(cudaError_t (*run)(void *argument), void *argument)
{
    struct frame frame = {.outer = innermost};
    volatile cudaError_t error;

    install_handlers();
    error = (cudaError_t)sigsetjmp(frame.buffer, 0);
    if (!error) {
        innermost = &frame;
        error = run(argument);
    }
    innermost = frame.outer;
    return error;
}
