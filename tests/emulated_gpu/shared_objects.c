/* Shared-memory objects, which other processes open by process and number.
 *
 * The name of an object contains its process, so that a later process can remove the objects of
 * processes that were killed.
 */
#define _GNU_SOURCE
#include "device.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#define PREFIX "emulated-gpu-"
#define NAME_BYTES 64

static pthread_once_t once = PTHREAD_ONCE_INIT;
static int creator; /* process that has created objects; a forked process has created none */

static void write_name(char *name, int process, uint64_t number)
{
    snprintf(name, NAME_BYTES, "/" PREFIX "%d-%llu", process, (unsigned long long)number);
}

/* Delete the objects of one process or, if it is 0, of all processes that have ended. */
static void delete_objects_of(int wanted)
{
    DIR *folder = opendir("/dev/shm");
    struct dirent *entry;
    char name[NAME_BYTES];
    int process;
    unsigned long long number;

    while (folder && (entry = readdir(folder)) != NULL) {
        if (sscanf(entry->d_name, PREFIX "%d-%llu", &process, &number) != 2)
            continue;
        if (wanted ? process != wanted : kill(process, 0) == 0 || errno != ESRCH)
            continue;
        write_name(name, process, number);
        shm_unlink(name);
    }
    if (folder)
        closedir(folder);
}

static void delete_leftovers(void)
{
    creator = getpid();
    delete_objects_of(0);
}

static void __attribute__((destructor)) delete_own_objects(void)
{
    if (creator == getpid())
        delete_objects_of(creator);
}

static void *map_object(int file, size_t bytes, void *place, int protection)
{
    void *found = mmap(place, bytes, protection, MAP_SHARED | (place ? MAP_FIXED : 0), file, 0);
    close(file);
    return found;
}

void *create_object(uint64_t number, size_t bytes, void *place, int protection)
{
    char name[NAME_BYTES];
    int file;

    pthread_once(&once, delete_leftovers);
    write_name(name, getpid(), number);
    file = shm_open(name, O_CREAT | O_RDWR | O_EXCL, 0600);
    if (file < 0)
        return MAP_FAILED;
    if (ftruncate(file, (off_t)bytes) != 0) {
        close(file);
        shm_unlink(name);
        return MAP_FAILED;
    }
    return map_object(file, bytes, place, protection);
}

void *open_object(int process, uint64_t number, size_t bytes, void *place)
{
    char name[NAME_BYTES];
    int file;

    write_name(name, process, number);
    file = shm_open(name, O_RDWR, 0);
    return file < 0 ? MAP_FAILED : map_object(file, bytes, place, PROT_READ | PROT_WRITE);
}

void delete_object(uint64_t number)
{
    char name[NAME_BYTES];
    int file;

    write_name(name, getpid(), number);
    file = shm_open(name, O_RDWR, 0);
    if (file < 0)
        return;
    if (ftruncate(file, 0) != 0)
        perror("emulated GPU: ftruncate");
    close(file);
    shm_unlink(name);
}
