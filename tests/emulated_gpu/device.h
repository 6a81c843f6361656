/* An emulated CUDA device over host memory: the interface between its parts.
 *
 * Work in a stream is queued, and runs only when something waits for it: as late as CUDA allows.
 * A missing wait therefore always reads old data.
 *
 * Environment variables:
 *   EMULATED_GPU_DEVICES  number of devices of the machine (default 2)
 *   CUDA_VISIBLE_DEVICES  devices that the process sees, by number ("1,0")
 *   EMULATED_GPU_REUSE    1: a new allocation gets the address of a freed one of its size
 */
#ifndef DEVICE_H
#define DEVICE_H

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_DEVICES 16
#define MEMORY_BYTES ((size_t)16 << 30) /* of a device, for each process */

/* One mutex protects the state of the device. Functions of the API hold it until they return, and
 * all functions below need it, unless their comments say otherwise. Work runs without it. */
char lock_device(void);
void unlock_device(char *held);
/* Unlock the mutex in a forked process, in which the thread that held it does not exist. */
void reset_device_lock(void);
/* Hold the mutex until the end of the block. */
#define HOLD_DEVICE __attribute__((cleanup(unlock_device), unused)) char held = lock_device()
/* Return an error, after making it the thread's last one. */
#define CHECK(ERROR)                                                                               \
    do {                                                                                           \
        cudaError_t checked = (ERROR);                                                             \
        if (checked)                                                                               \
            return failed(checked);                                                                \
    } while (0)
/* Begin a function of the runtime API that uses the device. */
#define BEGIN_CALL                                                                                 \
    HOLD_DEVICE;                                                                                   \
    CHECK(begin_call())

/* ---- contexts.c: devices, the context stack of each thread, error state ---- */

long read_variable(const char *name, long otherwise);
int visible_device_count(void);
/* Convert between a device's number in this process and its number on the machine. The result is
 * -1 for a device that the process does not see. */
int machine_device(int device);
int visible_device(int machine_device);
int current_device(void);
/* Make the primary context of the current device current, if none is (the runtime API does). */
cudaError_t ensure_context(void);
/* Ensure a context, and return the sticky error of its device. */
cudaError_t begin_call(void);
/* Set the thread's last runtime error unless it is cudaSuccess, and return it. */
cudaError_t failed(cudaError_t error);
/* The sticky error of a device. The first error is kept. */
cudaError_t device_error(int device);
void set_device_error(int device, cudaError_t error);
/* Make a device's primary context current on this thread until pop_device. */
void push_device(int device);
void pop_device(void);

/* ---- memory.c: allocations and their attributes ---- */

enum memory_kind { DEVICE_MEMORY, MANAGED_MEMORY, ASYNC_MEMORY, PINNED_MEMORY, IMPORTED_MEMORY };

struct allocation {
    char *address;
    size_t bytes;
    int device;
    enum memory_kind kind;
    int freed;
    uint64_t id;

    /* The pages that hold it, and the process and number that name its shared-memory object. */
    char *pages;
    size_t page_bytes;
    int process;
    uint64_t object;
    char *exported_address; /* IMPORTED_MEMORY: its address in that process */
    int references;         /* IMPORTED_MEMORY: number of calls that opened it */
    struct allocation *next; /* in the list of registered host memory, which has no pages */
};

/* Return the allocation that contains an address or lies nearest to it, freed ones included; NULL
 * if the address is in no memory of the emulated devices. Safe in a signal handler. */
const struct allocation *nearest_allocation(const void *address);
/* Return the allocation or registered host memory that contains an address, or NULL. */
struct allocation *find_allocation(const void *address);
/* Allocate memory of the current device for a module's variables; NULL if it is out of memory. */
void *allocate_variables(size_t bytes);

/* ---- shared_objects.c: shared memory that other processes open by process and number ---- */

#define EVENT_TABLE 0 /* number of the object with the counts of a process's events */

/* Map an object at `place` (NULL: anywhere). Returns MAP_FAILED if it does not exist. */
void *create_object(uint64_t number, size_t bytes, void *place);
void *open_object(int process, uint64_t number, size_t bytes, void *place);
/* Delete an object of this process. Later accesses by other processes raise SIGBUS. */
void delete_object(uint64_t number);

/* ---- faults.c: invalid accesses of running work. These functions do not need the mutex. ---- */

/* A function that runs work, in any thread, with the stream's device current. Its error is sticky:
 * every later call on the device returns it. */
typedef cudaError_t run_function(void *argument);

/* Run work. Returns its error, or the CUDA error for a signal such as SIGSEGV, which is reported
 * with the allocation that was accessed. */
cudaError_t run_guarded(run_function *run, void *argument);
/* Name the work that the thread runs, for reports. The string must outlive the work. */
void describe_work(const char *description);
/* Report memory that was written outside its allocation or freed too early. */
void report_access(const char *access, const void *address);

/* ---- streams.c: queues of commands ---- */

enum work_flags {
    SPINS = 1,       /* waits for memory that other devices write: it starts soon, unasked */
    SAME_DEVICE = 2, /* the stream must belong to the current device, as for kernels */
    ALWAYS = 4,      /* the work also runs after a device error; a graph cannot contain it */
    UNGUARDED = 8,   /* catches faults itself */
};

/* Work with a copy of its argument. */
struct work {
    run_function *run;
    const void *argument;
    size_t bytes;
    unsigned flags;
};

/* A place in a stream: the number of its commands up to there. */
struct place {
    struct stream *stream;
    uint64_t number;
};

struct stream {
    uint32_t magic; /* first: a stale handle is refused */
    int device;
    unsigned flags;
    int is_legacy, is_destroyed;
    struct stream *next;

    struct command *first, *last;
    uint64_t enqueued, done;
    int is_running;          /* a thread runs the first command */
    uint64_t legacy_seen;    /* latest place of the legacy stream that this stream waits for */
    uint64_t seen_by_legacy; /* latest place of this stream that the legacy stream waits for */
    uint64_t start_place;    /* the starter thread runs commands up to here */
    int has_starter;
    long start_delay_ns;
    unsigned queries;

    struct capture *capture; /* NULL: not capturing */
};

/* Begin a call that uses a stream: find it by its handle. It fails for the legacy stream during the
 * capture of a stream that this one would wait for. */
cudaError_t begin_stream_call(cudaStream_t handle, struct stream **stream);
/* Add work to a stream or, during capture, to its graph. */
cudaError_t enqueue(struct stream *stream, struct work work);
/* Add a command. `run` may be NULL. Returns its place. */
struct place append(struct stream *stream, struct work work);
/* Add a command that waits for a place in another stream. */
void append_wait(struct stream *stream, struct place place);
struct place end_of(struct stream *stream);
int is_done(struct place place);
/* Run the commands of a stream up to a place, or all commands of a device or of all devices. The
 * mutex is released meanwhile. */
void run_until(struct place place);
void run_device(int device);
void run_all_devices(void);
/* Run work on a device, without the mutex. Returns its error. */
cudaError_t run_work(int device, run_function *run, void *argument, unsigned flags);
/* Run commands up to a place in another thread, after a delay in nanoseconds. */
void start_later(struct place place, long delay_ns);
/* Start a detached thread that leaves the program's signals to other threads. */
void start_thread(void *(*run)(void *), void *argument);
/* Count a query of an incomplete place. After some queries its commands start. */
void count_query(struct place place, unsigned *queries);

/* ---- graphs.c: capture and graphs ---- */

/* Return an error if a capture forbids a call such as cudaMalloc on this thread, and invalidate
 * that capture. */
cudaError_t check_capture_safe(void);
/* Return an error for an illegal call on a capturing stream, and invalidate its capture. */
cudaError_t refuse_if_capturing(struct stream *stream, cudaError_t error);
/* End the capture of a stream that is destroyed. */
void abandon_capture(struct stream *stream);
cudaError_t capture_work(struct stream *stream, struct work work);

/* ---- execute.c: kernel launches ---- */

/* The argument of `execute_launch`, which runs the launch to its end. */
struct launch {
    const struct kernel *kernel;
    char *globals;
    uint32_t grid_dim[3], block_dim[3];
    uint32_t dynamic_shared_bytes;
    char parameters[] __attribute__((aligned(16)));
};

cudaError_t execute_launch(void *argument);

#endif
