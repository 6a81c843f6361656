/* Capture of streams into graphs, and graphs. */
#include "device.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GRAPH_MAGIC 0x6A6FA9u

struct node {
    cudaError_t (*run)(void *argument);
    void *argument;
    unsigned flags;
    int device;
    int has_dependents;
};

/* Nodes in the order of their capture, which every dependency respects. A handle of a graph, its
 * executable graphs and their pending launches share it. */
struct graph {
    uint32_t magic;
    int references;
    struct node *nodes;
    size_t node_count;
};

struct executable {
    uint32_t magic;
    struct graph *graph;
    struct place latest; /* launches of one executable graph run one after another */
};

struct capture {
    struct graph *graph;
    struct stream *origin;
    enum cudaStreamCaptureMode mode;
    pthread_t thread;
    enum capture_state state;
    unsigned long long id;
    struct capture *next;
};

/* Captures in progress. Structures are never freed, because events refer to them. */
static struct capture *captures;
static unsigned long long capture_count;
static _Thread_local enum cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

static void release_graph(struct graph *graph)
{
    if (!graph || --graph->references)
        return;
    for (size_t k = 0; k < graph->node_count; k++)
        free(graph->nodes[k].argument);
    free(graph->nodes);
    graph->magic = 0;
    free(graph);
}

/* ---- rules ---- */

static void invalidate(struct capture *capture)
{
    if (capture->state == CAPTURING)
        capture->state = CAPTURE_INVALIDATED;
}

cudaError_t refuse_if_capturing(struct stream *stream, cudaError_t error)
{
    if (!stream->capture)
        return cudaSuccess;
    if (stream->capture->state == CAPTURE_INVALIDATED)
        return cudaErrorStreamCaptureInvalidated;
    invalidate(stream->capture);
    return error;
}

cudaError_t check_legacy_capture(struct stream *stream)
{
    cudaError_t error = cudaSuccess;

    if (!stream->is_legacy)
        return cudaSuccess;
    for (struct stream *other = first_stream(); other; other = other->next)
        if (other->device == stream->device && !(other->flags & cudaStreamNonBlocking)
            && refuse_if_capturing(other, cudaErrorStreamCaptureImplicit))
            error = cudaErrorStreamCaptureImplicit;
    return error;
}

/* Return whether a capture forbids unsafe calls on this thread. */
static int forbids(const struct capture *capture)
{
    if (thread_mode == cudaStreamCaptureModeRelaxed
        || capture->mode == cudaStreamCaptureModeRelaxed)
        return 0;
    if (pthread_equal(capture->thread, pthread_self()))
        return 1;
    return thread_mode == cudaStreamCaptureModeGlobal
           && capture->mode == cudaStreamCaptureModeGlobal;
}

cudaError_t check_capture_safe(void)
{
    cudaError_t error = cudaSuccess;

    lock_device();
    for (struct capture *each = captures; each; each = each->next)
        if (forbids(each)) {
            invalidate(each);
            error = cudaErrorStreamCaptureUnsupported;
        }
    unlock_device();
    return error;
}

EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
    CUstreamCaptureMode before = (CUstreamCaptureMode)thread_mode;

    if ((unsigned)*mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    thread_mode = (enum cudaStreamCaptureMode)*mode;
    *mode = before;
    return CUDA_SUCCESS;
}

/* ---- captured work ---- */

static void set_tips(struct stream *stream, const unsigned *tips, size_t count)
{
    unsigned *copy = malloc((count + 1) * sizeof *copy); /* also allocates for an empty set */

    if (count)
        memcpy(copy, tips, count * sizeof *copy);
    free(stream->tips);
    stream->tips = copy;
    stream->tip_count = count;
}

cudaError_t capture_work(struct stream *stream, cudaError_t (*run)(void *), const void *argument,
                         size_t bytes, unsigned flags)
{
    struct graph *graph = stream->capture->graph;
    unsigned number = (unsigned)graph->node_count;
    struct node *node;

    if (stream->capture->state == CAPTURE_INVALIDATED)
        return cudaErrorStreamCaptureInvalidated;
    if (flags & ALWAYS)
        return refuse_if_capturing(stream, cudaErrorStreamCaptureUnsupported);
    graph->nodes = realloc(graph->nodes, (graph->node_count + 1) * sizeof *graph->nodes);
    for (size_t k = 0; k < stream->tip_count; k++)
        graph->nodes[stream->tips[k]].has_dependents = 1;
    node = graph->nodes + graph->node_count++;
    *node = (struct node){run, malloc(bytes + 1), flags, stream->device, 0};
    if (bytes)
        memcpy(node->argument, argument, bytes);
    set_tips(stream, &number, 1);
    return cudaSuccess;
}

void release_tips(struct captured_tips *tips)
{
    free(tips->tips);
    *tips = (struct captured_tips){0};
}

cudaError_t capture_record(struct stream *stream, struct captured_tips *tips)
{
    if (stream->capture->state == CAPTURE_INVALIDATED)
        return cudaErrorStreamCaptureInvalidated;
    release_tips(tips);
    tips->capture = stream->capture;
    tips->tip_count = stream->tip_count;
    tips->tips = malloc((stream->tip_count + 1) * sizeof *tips->tips);
    if (stream->tip_count)
        memcpy(tips->tips, stream->tips, stream->tip_count * sizeof *tips->tips);
    return cudaSuccess;
}

static void add_tips(struct stream *stream, const struct captured_tips *added)
{
    unsigned *all = malloc((stream->tip_count + added->tip_count + 1) * sizeof *all);
    size_t count = stream->tip_count;

    if (count)
        memcpy(all, stream->tips, count * sizeof *all);
    for (size_t k = 0; k < added->tip_count; k++) {
        size_t place = 0;
        while (place < count && all[place] != added->tips[k])
            place++;
        all[place] = added->tips[k];
        count += place == count;
    }
    set_tips(stream, all, count);
    free(all);
}

cudaError_t capture_wait(struct stream *stream, const struct captured_tips *tips)
{
    struct capture *capture = tips->capture;

    if (capture->state == CAPTURE_INVALIDATED)
        return cudaErrorStreamCaptureInvalidated;
    if (capture->state == NOT_CAPTURING)
        return cudaErrorCapturedEvent;
    if (stream->is_legacy) {
        invalidate(capture);
        return cudaErrorStreamCaptureImplicit;
    }
    if (stream->capture && stream->capture != capture) {
        invalidate(capture);
        invalidate(stream->capture);
        return cudaErrorStreamCaptureMerge;
    }
    if (!stream->capture)
        set_tips(stream, NULL, 0);
    stream->capture = capture;
    add_tips(stream, tips);
    return cudaSuccess;
}

cudaError_t refuse_captured_event(const struct captured_tips *tips)
{
    if (!tips->capture)
        return cudaSuccess;
    invalidate(tips->capture);
    return cudaErrorCapturedEvent;
}

/* ---- begin and end ---- */

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t handle, enum cudaStreamCaptureMode mode)
{
    cudaError_t error = begin_call();
    struct capture *made;
    struct stream *stream;

    if (error)
        return failed(error);
    lock_device();
    stream = find_stream(handle);
    if (!stream)
        error = cudaErrorInvalidResourceHandle;
    else if (stream->is_legacy)
        error = cudaErrorStreamCaptureUnsupported;
    else if (stream->capture)
        error = cudaErrorIllegalState;
    if (!error) {
        made = calloc(1, sizeof *made);
        made->graph = calloc(1, sizeof *made->graph);
        made->graph->magic = GRAPH_MAGIC;
        made->graph->references = 1;
        made->origin = stream;
        made->mode = mode;
        made->thread = pthread_self();
        made->state = CAPTURING;
        made->id = ++capture_count;
        made->next = captures, captures = made;
        stream->capture = made;
        set_tips(stream, NULL, 0);
    }
    unlock_device();
    return failed(error);
}

/* Return whether all captured work precedes the present place of the origin stream. */
static int is_joined(const struct capture *capture)
{
    const struct stream *origin = capture->origin;

    for (size_t node = 0; node < capture->graph->node_count; node++) {
        size_t k = 0;
        if (capture->graph->nodes[node].has_dependents)
            continue;
        while (k < origin->tip_count && origin->tips[k] != node)
            k++;
        if (k == origin->tip_count)
            return 0;
    }
    return 1;
}

static void end_capture(struct capture *capture)
{
    struct capture **link = &captures;

    while (*link != capture)
        link = &(*link)->next;
    *link = capture->next;
    for (struct stream *stream = first_stream(); stream; stream = stream->next)
        if (stream->capture == capture) {
            stream->capture = NULL;
            set_tips(stream, NULL, 0);
        }
    capture->state = NOT_CAPTURING;
}

void abandon_capture(struct stream *stream)
{
    struct capture *capture = stream->capture;

    if (!capture)
        return;
    invalidate(capture);
    stream->capture = NULL;
    if (capture->origin == stream) {
        end_capture(capture);
        release_graph(capture->graph);
    }
}

static cudaError_t check_end(const struct stream *stream)
{
    const struct capture *capture = stream->capture;

    if (!capture)
        return cudaErrorIllegalState;
    if (capture->origin != stream)
        return cudaErrorStreamCaptureUnmatched;
    if (capture->mode != cudaStreamCaptureModeRelaxed
        && !pthread_equal(capture->thread, pthread_self()))
        return cudaErrorStreamCaptureWrongThread;
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph)
{
    cudaError_t error = begin_call();
    struct capture *capture;
    struct stream *stream;

    *graph = NULL;
    if (error)
        return failed(error);
    lock_device();
    stream = find_stream(handle);
    error = stream ? check_end(stream) : cudaErrorInvalidResourceHandle;
    if (error) {
        unlock_device();
        return failed(error);
    }
    capture = stream->capture;
    if (capture->state == CAPTURE_INVALIDATED)
        error = cudaErrorStreamCaptureInvalidated;
    else if (!is_joined(capture))
        error = cudaErrorStreamCaptureUnjoined;
    end_capture(capture);
    if (error)
        release_graph(capture->graph);
    else
        *graph = (cudaGraph_t)capture->graph;
    capture->graph = NULL;
    unlock_device();
    return failed(error);
}

static enum cudaStreamCaptureStatus status_of(const struct stream *stream)
{
    if (!stream->capture)
        return cudaStreamCaptureStatusNone;
    return stream->capture->state == CAPTURING ? cudaStreamCaptureStatusActive
                                               : cudaStreamCaptureStatusInvalidated;
}

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t handle, enum cudaStreamCaptureStatus *status)
{
    return cudaStreamGetCaptureInfo(handle, status, NULL, NULL, NULL, NULL, NULL);
}

/* Graphs have no nodes that a program can name: it gets no dependencies. */
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle,
                                            enum cudaStreamCaptureStatus *status,
                                            unsigned long long *id, cudaGraph_t *graph,
                                            const cudaGraphNode_t **dependencies,
                                            const cudaGraphEdgeData **edges, size_t *count)
{
    cudaError_t error = begin_call();
    struct stream *stream;

    *status = cudaStreamCaptureStatusNone;
    if (error)
        return failed(error);
    if (graph || dependencies || edges)
        return failed(cudaErrorNotSupported);
    lock_device();
    stream = find_stream(handle);
    error = stream ? check_legacy_capture(stream) : cudaErrorInvalidResourceHandle;
    if (!error)
        *status = status_of(stream);
    if (!error && id && stream->capture)
        *id = stream->capture->id;
    if (!error && count)
        *count = stream->tip_count;
    unlock_device();
    return failed(error);
}

/* ---- graphs ---- */

static cudaError_t run_node(const struct node *node)
{
    cudaError_t error;

    push_device(node->device);
    error = node->flags & UNGUARDED ? node->run(node->argument)
                                    : run_guarded(node->run, node->argument);
    pop_device();
    return error;
}

static cudaError_t run_graph(void *argument)
{
    struct graph *graph = *(struct graph **)argument;
    cudaError_t error = cudaSuccess;

    for (size_t k = 0; k < graph->node_count && !error; k++)
        error = run_node(graph->nodes + k);
    lock_device();
    release_graph(graph);
    unlock_device();
    return error;
}

static struct graph *find_graph(cudaGraph_t handle)
{
    struct graph *found = (struct graph *)handle;
    return found && found->magic == GRAPH_MAGIC ? found : NULL;
}

static struct executable *find_executable(cudaGraphExec_t handle)
{
    struct executable *found = (struct executable *)handle;
    return found && found->magic == GRAPH_MAGIC ? found : NULL;
}

EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t *handle, cudaGraph_t graph_handle,
                                        unsigned long long flags)
{
    cudaError_t error = begin_call();
    struct graph *graph = find_graph(graph_handle);
    struct executable *made;

    (void)flags;
    if (error || !graph)
        return failed(error ? error : cudaErrorInvalidValue);
    made = calloc(1, sizeof *made);
    made->magic = GRAPH_MAGIC;
    made->graph = graph;
    lock_device();
    graph->references++;
    unlock_device();
    *handle = (cudaGraphExec_t)made;
    return cudaSuccess;
}

/* The command waits for the previous launch. It catches faults by node, not as a whole. */
static cudaError_t launch(struct executable *executable, struct stream *stream)
{
    struct graph *graph = executable->graph;
    unsigned flags = UNGUARDED;
    cudaError_t error;

    for (size_t k = 0; k < graph->node_count; k++)
        flags |= graph->nodes[k].flags & SPINS;
    if (!stream->capture && executable->latest.stream)
        append_wait(stream, executable->latest);
    error = append_or_capture(stream, run_graph, &graph, sizeof graph, flags);
    if (error)
        return error;
    /* A captured launch runs any number of times, so that its graph must remain. */
    graph->references += stream->capture ? 1 << 20 : 1;
    if (!stream->capture)
        executable->latest = (struct place){stream, stream->enqueued};
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream_handle)
{
    cudaError_t error = begin_call();
    struct executable *executable = find_executable(handle);
    struct stream *stream;

    if (error || !executable)
        return failed(error ? error : cudaErrorInvalidValue);
    lock_device();
    stream = find_stream(stream_handle);
    error = stream ? launch(executable, stream) : cudaErrorInvalidResourceHandle;
    unlock_device();
    return failed(error);
}

EXPORT cudaError_t cudaGraphUpload(cudaGraphExec_t handle, cudaStream_t stream)
{
    (void)stream;
    return failed(find_executable(handle) ? begin_call() : cudaErrorInvalidValue);
}

EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t handle)
{
    struct graph *graph = find_graph(handle);

    if (!graph)
        return failed(cudaErrorInvalidValue);
    lock_device();
    release_graph(graph);
    unlock_device();
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t handle)
{
    struct executable *executable = find_executable(handle);

    if (!executable)
        return failed(cudaErrorInvalidValue);
    lock_device();
    release_graph(executable->graph);
    executable->magic = 0;
    free(executable);
    unlock_device();
    return cudaSuccess;
}
