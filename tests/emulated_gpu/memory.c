/* Allocations and their attributes.
 *
 * All memory lies in one reserved range of addresses. Each allocation is a shared-memory object
 * between guard pages. Freed addresses are not used again, so that late accesses fault (unless
 * EMULATED_GPU_REUSE is set).
 */
#define _GNU_SOURCE
#include "device.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define ARENA_BYTES ((size_t)1 << 43)
#define MAX_ALLOCATIONS ((size_t)1 << 24)
#define PAGE_BYTES ((size_t)4096)
#define GUARD_BYTES ((size_t)65536)
#define ALIGNMENT ((size_t)256)
#define GARBAGE 0xEE
#define GARBAGE_BYTES ((size_t)1 << 20) /* untouched pages use no memory */
#define CANARY 0xC5

struct registration {
    struct allocation memory;
    struct registration *next;
};

/* The allocations in the order of their addresses; reserved in full, so that they never move. */
static struct allocation *allocations;
static size_t allocation_count;
static char *arena, *arena_next;
static uint64_t next_id = 1;
static size_t used_bytes[MAX_DEVICES];
static struct registration *registrations;
static char default_pools[MAX_DEVICES]; /* whose addresses are the handles */

static size_t round_up(size_t bytes, size_t unit)
{
    return (bytes + unit - 1) / unit * unit;
}

static size_t device_bytes(void)
{
    return (size_t)read_variable("EMULATED_GPU_MEMORY_BYTES", 16L << 30);
}

static void *reserve(size_t bytes, int protection)
{
    return mmap(NULL, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

static int is_in_arena(const void *address)
{
    return arena && (char *)address >= arena && (char *)address < arena + ARENA_BYTES;
}

/* ---- the table ---- */

/* Return the number of allocations that begin at an address or below it. */
static size_t count_below(const void *address)
{
    size_t low = 0, high = allocation_count;

    while (low < high) {
        size_t middle = (low + high) / 2;
        if ((const char *)address >= allocations[middle].address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

const struct allocation *nearest_allocation(const void *address)
{
    size_t count = count_below(address);
    const struct allocation *before = allocations + count - 1, *after = allocations + count;

    if (!is_in_arena(address) || !allocation_count)
        return NULL;
    if (count == 0 || count == allocation_count)
        return count ? before : after;
    if ((char *)address - (before->address + before->bytes) < after->address - (char *)address)
        return before;
    return after;
}

struct allocation *first_allocation(void)
{
    return allocations;
}

struct allocation *end_of_allocations(void)
{
    return allocations + allocation_count;
}

static int contains(const struct allocation *memory, const void *address)
{
    return (const char *)address >= memory->address
           && (const char *)address < memory->address + memory->bytes;
}

struct allocation *find_allocation(const void *address)
{
    size_t count = count_below(address);

    if (is_in_arena(address)) {
        struct allocation *found = allocations + count - 1;
        return count && !found->freed && contains(found, address) ? found : NULL;
    }
    for (struct registration *each = registrations; each; each = each->next)
        if (contains(&each->memory, address))
            return &each->memory;
    return NULL;
}

/* Return a freed entry of the same size, if addresses are to be used again. */
static struct allocation *find_reusable(size_t page_bytes)
{
    if (!read_variable("EMULATED_GPU_REUSE", 0))
        return NULL;
    for (size_t k = 0; k < allocation_count; k++)
        if (allocations[k].freed && allocations[k].page_bytes == page_bytes)
            return allocations + k;
    return NULL;
}

/* Return an entry with addresses for an allocation, whose pages are not mapped yet. */
static struct allocation *add_entry(size_t bytes, size_t page_bytes)
{
    struct allocation *found;

    if (!arena) {
        arena = arena_next = reserve(ARENA_BYTES, PROT_NONE);
        allocations = reserve(MAX_ALLOCATIONS * sizeof *allocations, PROT_READ | PROT_WRITE);
        if (arena == MAP_FAILED || allocations == MAP_FAILED)
            abort();
    }
    found = find_reusable(page_bytes);
    if (!found) {
        if (allocation_count == MAX_ALLOCATIONS
            || page_bytes + 2 * GUARD_BYTES > (size_t)(arena + ARENA_BYTES - arena_next))
            return NULL;
        found = allocations + allocation_count;
        *found = (struct allocation){.pages = arena_next + GUARD_BYTES, .page_bytes = page_bytes};
        arena_next = found->pages + page_bytes;
    }
    /* The end of the memory is the end of its pages. */
    found->address = found->pages + page_bytes - round_up(bytes, ALIGNMENT);
    found->bytes = bytes;
    found->freed = 1;
    found->id = next_id++;
    allocation_count += found == allocations + allocation_count;
    return found;
}

/* ---- mapping ---- */

static void fill(const struct allocation *memory)
{
    char *end = memory->address + memory->bytes;

    memset(memory->pages, CANARY, (size_t)(memory->address - memory->pages));
    memset(memory->address, GARBAGE,
           memory->bytes < GARBAGE_BYTES ? memory->bytes : GARBAGE_BYTES);
    memset(end, CANARY, (size_t)(memory->pages + memory->page_bytes - end));
}

static int is_filled(const char *begin, const char *end)
{
    for (; begin < end; begin++)
        if (*begin != (char)CANARY) {
            report_access("earlier write outside of the allocation", begin);
            return 0;
        }
    return 1;
}

static int has_intact_canary(const struct allocation *memory)
{
    const char *end = memory->address + memory->bytes;
    return is_filled(memory->pages, memory->address)
           && is_filled(end, memory->pages + memory->page_bytes);
}

static cudaError_t allocate(void **address, size_t bytes, int device, enum memory_kind kind)
{
    size_t page_bytes = round_up(bytes, PAGE_BYTES);
    int is_on_device = kind != PINNED_MEMORY;
    struct allocation *made;

    *address = NULL;
    if (!bytes)
        return cudaSuccess;
    lock_device();
    if (bytes > ARENA_BYTES / 2
        || (is_on_device && used_bytes[device] + page_bytes > device_bytes())
        || !(made = add_entry(bytes, page_bytes))) {
        unlock_device();
        return cudaErrorMemoryAllocation;
    }
    made->device = device, made->kind = kind;
    made->process = getpid(), made->object = made->id;
    if (create_object(made->id, page_bytes, made->pages, PROT_READ | PROT_WRITE) == MAP_FAILED) {
        unlock_device();
        return cudaErrorMemoryAllocation;
    }
    fill(made);
    protect_memory(made);
    made->freed = 0;
    if (is_on_device)
        used_bytes[device] += page_bytes;
    *address = made->address;
    unlock_device();
    return cudaSuccess;
}

void unmap_allocation(struct allocation *found)
{
    mmap(found->pages, found->page_bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    found->freed = 1;
}

/* Free memory. The mutex must be held. */
static cudaError_t release(struct allocation *found)
{
    unsigned before = allow_access(ALL_DEVICES);
    cudaError_t error = has_intact_canary(found) ? cudaSuccess : cudaErrorIllegalAddress;

    allow_access(before);
    if (error)
        set_device_error(found->device, error);
    unmap_allocation(found);
    delete_object(found->object);
    if (found->kind != PINNED_MEMORY)
        used_bytes[found->device] -= found->page_bytes;
    return error;
}

struct allocation *import_allocation(const struct allocation *handle)
{
    struct allocation *made = add_entry(handle->bytes, handle->page_bytes);

    if (!made
        || open_object(handle->process, handle->object, made->page_bytes, made->pages)
               == MAP_FAILED)
        return NULL;
    made->device = handle->device;
    made->kind = IMPORTED_MEMORY;
    made->process = handle->process, made->object = handle->object;
    made->exported_address = handle->exported_address;
    made->references = 1;
    protect_memory(made);
    made->freed = 0;
    return made;
}

/* ---- allocation, runtime ---- */

static cudaError_t begin_allocation(void)
{
    cudaError_t error = begin_call();
    return error ? error : check_capture_safe();
}

void *allocate_variables(size_t bytes)
{
    void *address;
    allocate(&address, bytes, current_device(), DEVICE_MEMORY);
    return address;
}

static cudaError_t allocate_now(void **address, size_t bytes, enum memory_kind kind)
{
    cudaError_t error = begin_allocation();
    if (!error)
        error = allocate(address, bytes, current_device(), kind);
    return failed(error);
}

EXPORT cudaError_t cudaMalloc(void **address, size_t bytes)
{
    return allocate_now(address, bytes, DEVICE_MEMORY);
}

EXPORT cudaError_t cudaMallocManaged(void **address, size_t bytes, unsigned flags)
{
    (void)flags;
    return allocate_now(address, bytes, MANAGED_MEMORY);
}

EXPORT cudaError_t cudaHostAlloc(void **address, size_t bytes, unsigned flags)
{
    (void)flags;
    return allocate_now(address, bytes, PINNED_MEMORY);
}

/* Free memory once the work of all devices is done, because any device may use it. */
static cudaError_t free_now(void *address, int is_pinned)
{
    cudaError_t error = begin_allocation();
    struct allocation *found;

    if (error || !address)
        return failed(error);
    lock_device();
    found = find_allocation(address);
    unlock_device();
    if (!found || found->address != address || found->kind == IMPORTED_MEMORY
        || (found->kind == PINNED_MEMORY) != is_pinned || !found->pages) {
        report_access("invalid call of cudaFree", address);
        return failed(cudaErrorInvalidValue);
    }
    for (int device = 0; device < visible_device_count(); device++)
        run_device(device);
    lock_device();
    error = release(found);
    unlock_device();
    return failed(error ? error : device_error(current_device()));
}

EXPORT cudaError_t cudaFree(void *address)
{
    return free_now(address, 0);
}

EXPORT cudaError_t cudaFreeHost(void *address)
{
    return free_now(address, 1);
}

EXPORT cudaError_t cudaMemGetInfo(size_t *available, size_t *total)
{
    cudaError_t error = begin_call();
    *total = device_bytes();
    lock_device();
    *available = *total - used_bytes[current_device()];
    unlock_device();
    return failed(error);
}

static int overlaps_registration(const char *address, size_t bytes)
{
    for (struct registration *each = registrations; each; each = each->next)
        if (address < each->memory.address + each->memory.bytes
            && each->memory.address < address + bytes)
            return 1;
    return 0;
}

EXPORT cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned flags)
{
    cudaError_t error = begin_allocation();
    struct registration *made;

    (void)flags;
    if (error || !address || !bytes)
        return failed(error ? error : cudaErrorInvalidValue);
    lock_device();
    if (is_in_arena(address) || overlaps_registration(address, bytes)) {
        unlock_device();
        return failed(cudaErrorHostMemoryAlreadyRegistered);
    }
    made = calloc(1, sizeof *made);
    made->memory = (struct allocation){.address = address, .bytes = bytes, .kind = PINNED_MEMORY,
                                       .device = current_device(), .id = next_id++};
    made->next = registrations, registrations = made;
    unlock_device();
    return cudaSuccess;
}

EXPORT cudaError_t cudaHostUnregister(void *address)
{
    cudaError_t error = begin_allocation();
    struct registration *found, **link;

    if (error)
        return failed(error);
    for (int device = 0; device < visible_device_count(); device++)
        run_device(device);
    lock_device();
    for (link = &registrations; *link && (*link)->memory.address != address; link = &(*link)->next)
        ;
    found = *link;
    if (found)
        *link = found->next;
    unlock_device();
    free(found);
    return failed(found ? cudaSuccess : cudaErrorHostMemoryNotRegistered);
}

/* ---- stream-ordered memory ---- */

static cudaError_t run_allocation(void *argument)
{
    struct allocation *memory = *(struct allocation **)argument;
    mprotect(memory->pages, memory->page_bytes, PROT_READ | PROT_WRITE);
    return cudaSuccess;
}

static cudaError_t run_free(void *argument)
{
    cudaError_t error;
    lock_device();
    error = release(*(struct allocation **)argument);
    unlock_device();
    return error;
}

EXPORT cudaError_t cudaMallocAsync(void **address, size_t bytes, cudaStream_t stream)
{
    struct allocation *made;
    cudaError_t error = begin_call();

    if (!error)
        error = allocate(address, bytes, current_device(), ASYNC_MEMORY);
    if (error || !bytes)
        return failed(error);
    lock_device();
    made = find_allocation(*address);
    /* No stream may access it before the stream has reached the allocation. */
    mprotect(made->pages, made->page_bytes, PROT_NONE);
    unlock_device();
    return failed(enqueue(stream, run_allocation, &made, sizeof made, ALWAYS));
}

EXPORT cudaError_t cudaFreeAsync(void *address, cudaStream_t stream)
{
    cudaError_t error = begin_call();
    struct allocation *found;

    if (error || !address)
        return failed(error);
    lock_device();
    found = find_allocation(address);
    unlock_device();
    if (!found || found->address != address
        || (found->kind != ASYNC_MEMORY && found->kind != DEVICE_MEMORY)) {
        report_access("invalid call of cudaFreeAsync", address);
        return failed(cudaErrorInvalidValue);
    }
    return failed(enqueue(stream, run_free, &found, sizeof found, ALWAYS));
}

EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device)
{
    if (machine_device(device) < 0)
        return failed(cudaErrorInvalidDevice);
    *pool = (cudaMemPool_t)&default_pools[device];
    return cudaSuccess;
}

/* ---- attributes of pointers ---- */

EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found,
                                            const void *address)
{
    static const enum cudaMemoryType types[] = {
        [DEVICE_MEMORY] = cudaMemoryTypeDevice,   [MANAGED_MEMORY] = cudaMemoryTypeManaged,
        [ASYNC_MEMORY] = cudaMemoryTypeDevice,    [PINNED_MEMORY] = cudaMemoryTypeHost,
        [IMPORTED_MEMORY] = cudaMemoryTypeDevice,
    };
    struct allocation *memory;

    memset(found, 0, sizeof *found);
    found->device = cudaInvalidDeviceId;
    found->hostPointer = (void *)address;
    lock_device();
    memory = find_allocation(address);
    if (memory) {
        found->type = types[memory->kind];
        found->device = memory->device;
        found->devicePointer = (void *)address;
        if (found->type == cudaMemoryTypeDevice)
            found->hostPointer = NULL;
    }
    unlock_device();
    return failed(ensure_context());
}

static CUresult write_attribute(void *value, CUpointer_attribute attribute,
                                const struct allocation *memory)
{
    int is_pinned = memory->kind == PINNED_MEMORY, is_managed = memory->kind == MANAGED_MEMORY;

    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)value = is_pinned ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        *(uint64_t *)value = memory->id;
        break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        *(unsigned *)value = is_managed;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)value = memory->device;
        break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        *(unsigned *)value = memory->kind == DEVICE_MEMORY;
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        *(char **)value = memory->address;
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        *(size_t *)value = memory->bytes;
        break;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        *(void **)value = memory->kind == ASYNC_MEMORY ? default_pools + memory->device : NULL;
        break;
    default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute,
                                      CUdeviceptr address)
{
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    struct allocation *memory;

    lock_device();
    memory = find_allocation((void *)address);
    if (memory)
        result = write_attribute(value, attribute, memory);
    unlock_device();
    return result;
}

/* As in CUDA, unknown memory is not an error, and its attributes are zero. */
EXPORT CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute *attributes,
                                       void **values, CUdeviceptr address)
{
    static const struct allocation unknown = {.kind = PINNED_MEMORY};
    struct allocation *memory;

    lock_device();
    memory = find_allocation((void *)address);
    for (unsigned k = 0; k < count; k++)
        if (memory)
            write_attribute(values[k], attributes[k], memory);
        else if (attributes[k] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
            *(int *)values[k] = cudaInvalidDeviceId;
        else if (attributes[k] != CU_POINTER_ATTRIBUTE_CONTEXT)
            write_attribute(values[k], attributes[k], &unknown);
    unlock_device();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *device_address, void *address,
                                             unsigned flags)
{
    struct allocation *memory;

    (void)flags;
    lock_device();
    memory = find_allocation(address);
    unlock_device();
    *device_address = (CUdeviceptr)address;
    return memory && memory->kind == PINNED_MEMORY ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
