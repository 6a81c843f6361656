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

#define NAME "/emulated-gpu-%d-%llu"

struct name {
    char text[64];
};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static int creator; /* process that has created objects; a forked process has created none */

static struct name name_of(int process, unsigned long long number)
{
    struct name name;
    snprintf(name.text, sizeof name.text, NAME, process, number);
    return name;
}

/* Delete the objects of one process or, if it is 0, of all processes that have ended. */
static void delete_objects_of(int wanted)
{
    DIR *folder = opendir("/dev/shm");
    struct dirent *entry;
    int process;
    unsigned long long number;

    while (folder && (entry = readdir(folder)) != NULL) {
        if (sscanf(entry->d_name, NAME + 1, &process, &number) != 2)
            continue;
        if (wanted ? process == wanted : kill(process, 0) != 0 && errno == ESRCH)
            shm_unlink(name_of(process, number).text);
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

static void *map_object(int file, size_t bytes, void *place)
{
    void *found = MAP_FAILED;

    if (file >= 0) {
        found = mmap(place, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | (place ? MAP_FIXED : 0),
                     file, 0);
        close(file);
    }
    return found;
}

void *create_object(uint64_t number, size_t bytes, void *place)
{
    struct name name = name_of(getpid(), number);
    int file;

    pthread_once(&once, delete_leftovers);
    file = shm_open(name.text, O_CREAT | O_RDWR | O_EXCL, 0600);
    if (file >= 0 && ftruncate(file, (off_t)bytes) != 0) {
        close(file);
        shm_unlink(name.text);
        return MAP_FAILED;
    }
    return map_object(file, bytes, place);
}

void *open_object(int process, uint64_t number, size_t bytes, void *place)
{
    return map_object(shm_open(name_of(process, number).text, O_RDWR, 0), bytes, place);
}

void delete_object(uint64_t number)
{
    struct name name = name_of(getpid(), number);
    int file = shm_open(name.text, O_RDWR, 0);

    if (file < 0)
        return;
    if (ftruncate(file, 0) != 0)
        perror("emulated GPU: ftruncate");
    close(file);
    shm_unlink(name.text);
}
