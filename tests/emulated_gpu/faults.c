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

static const int signals[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
#define SIGNAL_COUNT (sizeof signals / sizeof *signals)

static _Thread_local struct frame *innermost;
static struct sigaction previous[SIGNAL_COUNT];

void describe_work(const char *description)
{
    if (innermost)
        innermost->description = description;
}

static const char *kind_name(enum memory_kind kind)
{
    static const char *names[] = {"device", "managed", "stream-ordered", "pinned", "imported"};
    return names[kind];
}

void report_access(const char *access, const void *address)
{
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
                           kind_name(found->kind), (unsigned long long)found->id, found->device,
                           found->bytes, (void *)found->address,
                           (const char *)address - found->address,
                           found->freed ? ", which was freed" : "");
    if (write(STDERR_FILENO, text, (size_t)length) < 0)
        return;
}

static const char *access_name(int number, const siginfo_t *info, void *context)
{
    if (number == SIGSEGV && info->si_code == SEGV_PKUERR)
        return innermost ? "access without peer access" : "access by the host";
    if (number == SIGBUS)
        return "access to memory that its process has freed";
    if (number == SIGILL)
        return "trap";
    if (number == SIGFPE)
        return "arithmetic fault";
#ifdef __x86_64__
    if (((ucontext_t *)context)->uc_mcontext.gregs[REG_ERR] & 2)
        return "invalid write";
    return "invalid read";
#else
    (void)context;
    return "invalid access";
#endif
}

static cudaError_t error_of(int number)
{
    switch (number) {
    case SIGILL:
        return cudaErrorMisalignedAddress; /* translated kernels trap at misaligned accesses */
    case SIGFPE:
        return cudaErrorLaunchFailure;
    default:
        return cudaErrorIllegalAddress;
    }
}

static void restore(int number)
{
    for (size_t k = 0; k < SIGNAL_COUNT; k++)
        if (signals[k] == number)
            sigaction(number, &previous[k], NULL);
}

static void handle(int number, siginfo_t *info, void *context)
{
    /* Python's faulthandler raises the signal again: return, and the access faults once more. */
    if (info->si_code <= 0 && innermost)
        return;
    if (innermost || (number != SIGILL && nearest_allocation(info->si_addr)))
        report_access(access_name(number, info, context), info->si_addr);
    if (innermost)
        siglongjmp(innermost->buffer, error_of(number));
    restore(number);
    if (info->si_code <= 0)
        raise(number);
}

/* Install the handlers. Other libraries may have replaced them since the last call. */
static void install_handlers(void)
{
    struct sigaction now, wanted = {.sa_sigaction = handle,
                                    .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK};

    for (size_t k = 0; k < SIGNAL_COUNT; k++) {
        sigaction(signals[k], NULL, &now);
        if (now.sa_flags & SA_SIGINFO && now.sa_sigaction == handle)
            continue;
        previous[k] = now;
        sigaction(signals[k], &wanted, NULL);
    }
}

cudaError_t run_guarded(cudaError_t (*run)(void *argument), void *argument)
{
    struct frame frame = {.outer = innermost};
    const unsigned before = allow_access(ALL_DEVICES);
    volatile cudaError_t error;

    install_handlers();
    error = (cudaError_t)sigsetjmp(frame.buffer, 0);
    if (!error) {
        innermost = &frame;
        error = run(argument);
    }
    innermost = frame.outer;
    allow_access(before);
    return error;
}
