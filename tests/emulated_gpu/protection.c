/* Which memory a thread may access, by memory protection keys (pkeys(7)): one for each device.
 *
 * A kernel accesses its own device, and peers to which access is enabled. Copies access all devices.
 * The host accesses none. Keys belong to threads, so kernels of several devices run at once.
 * Processors without keys check nothing. */
#define _GNU_SOURCE
#include "device.h"

#include <sys/mman.h>

static int keys[MAX_DEVICES]; /* 0: none */
static unsigned char is_enabled[MAX_DEVICES][MAX_DEVICES];
static _Thread_local unsigned accessible; /* a bit for each device */

static int key_of(int device)
{
    if (!keys[device] && read_variable("EMULATED_GPU_PROTECTION", 1)) {
        int made = pkey_alloc(0, PKEY_DISABLE_ACCESS);
        keys[device] = made > 0 ? made : 0;
    }
    return keys[device];
}

void protect_memory(const struct allocation *memory)
{
    int is_on_device = memory->kind != PINNED_MEMORY && memory->kind != MANAGED_MEMORY;
    int key = is_on_device ? key_of(memory->device) : 0;

    if (key)
        pkey_mprotect(memory->pages, memory->page_bytes, PROT_READ | PROT_WRITE, key);
}

unsigned allow_access(unsigned devices)
{
    unsigned before = accessible;

    accessible = devices;
    for (int device = 0; device < visible_device_count(); device++)
        if (keys[device])
            pkey_set(keys[device], devices >> device & 1 ? 0 : PKEY_DISABLE_ACCESS);
    return before;
}

void enable_peer(int device, int peer)
{
    is_enabled[device][peer] = 1;
}

unsigned accessible_from(int device)
{
    unsigned found = 1u << device;

    for (int peer = 0; peer < visible_device_count(); peer++)
        found |= (unsigned)is_enabled[device][peer] << peer;
    return found;
}
