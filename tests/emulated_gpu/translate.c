/* PTX text to a shared library, by ptx.py, once for all processes. */
#define _GNU_SOURCE
#include "modules.h"

#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

/* FNV-1a. */
static uint64_t hash(const char *text, uint64_t state)
{
    for (; *text; text++)
        state = (state ^ (unsigned char)*text) * 0x100000001b3;
    return state;
}

/* Return FOLDER/HASH.SUFFIX, to be freed. */
static char *cached_path(const char *text, const char *suffix)
{
    const char *const folder = getenv("EMULATED_GPU_CACHE");
    const uint64_t version = hash(TRANSLATOR_VERSION, 0xcbf29ce484222325);
    char *path = NULL;

    if (asprintf(&path, "%s/%016lx%016lx.%s", folder ? folder : "/tmp",
                 (unsigned long)hash(text, version), (unsigned long)hash(text, ~version),
                 suffix) < 0)
        abort();
    return path;
}

static int write_text(const char *path, const char *text)
{
    FILE *const file = fopen(path, "w");

    if (!file)
        return -1;
    const int failed = fputs(text, file) < 0;
    return fclose(file) || failed ? -1 : 0;
}

/* The environment without the variables that make programs load the emulated device. */
static char **plain_environment(void)
{
    static const char *const left_out[] = {"LD_LIBRARY_PATH=", "LD_PRELOAD=", "PYTHONPATH="};
    size_t count = 0, kept = 0;

    while (environ[count])
        count++;
    char **const found = malloc((count + 1) * sizeof *found);
    for (size_t i = 0; i < count; i++) {
        int is_left_out = 0;
        for (size_t k = 0; k < sizeof left_out / sizeof *left_out; k++)
            is_left_out |= !strncmp(environ[i], left_out[k], strlen(left_out[k]));
        if (!is_left_out)
            found[kept++] = environ[i];
    }
    found[kept] = NULL;
    return found;
}

static int run_translator(char *source, char *output, const char *log)
{
    char *const arguments[] = {PYTHON, TRANSLATOR, source, output, NULL};
    char **const variables = plain_environment();
    posix_spawn_file_actions_t actions;
    pid_t child;
    int status = -1;

    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 1, log, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    posix_spawn_file_actions_adddup2(&actions, 1, 2);
    if (!posix_spawn(&child, PYTHON, &actions, NULL, arguments, variables))
        while (waitpid(child, &status, 0) < 0 && errno == EINTR)
            ;
    posix_spawn_file_actions_destroy(&actions);
    free(variables);
    return status;
}

static void print_file(const char *path)
{
    char buffer[4096];
    FILE *const file = fopen(path, "r");

    for (size_t n; file && (n = fread(buffer, 1, sizeof buffer, file)) > 0;)
        fwrite(buffer, 1, n, stderr);
    if (file)
        fclose(file);
}

/* Compile the module if no process has done it. The lock is held. */
static int ensure_compiled(const char *text, char *output)
{
    if (!access(output, R_OK))
        return 0;
    char *const source = cached_path(text, "ptx"), *const log = cached_path(text, "log");
    const int result = write_text(source, text) ? -1 : run_translator(source, output, log);
    if (result) {
        fprintf(stderr, "emulated GPU: %s cannot be translated:\n", source);
        print_file(log);
    }
    free(source);
    free(log);
    return result;
}

char *translate_ptx(const char *text)
{
    char *const output = cached_path(text, "so"), *const lock = cached_path(text, "lock");
    const int file = open(lock, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    int result = -1;

    if (file >= 0) {
        while (flock(file, LOCK_EX) && errno == EINTR)
            ;
        result = ensure_compiled(text, output);
        close(file);
    } else
        fprintf(stderr, "emulated GPU: cannot create %s: %s\n", lock, strerror(errno));
    free(lock);
    if (!result)
        return output;
    free(output);
    return NULL;
}
