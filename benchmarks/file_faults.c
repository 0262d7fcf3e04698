/* LD_PRELOAD: let single file operations fail, by path.

   FILE_FAULTS="OPERATION|SUBSTRING|ACTION|ERRNO|FIRST|COUNT": the calls number FIRST to FIRST + COUNT - 1 of an operation
   on a path with SUBSTRING. Operations: open (for writing), read, write, fsync, rename, mkdir, unlink, flock.
   Actions: fail (nothing is done), late (done, and then reported as failed), short (a write of half of the bytes).
   FILE_FAULTS is read at each call: a process that is forked with the library gets its own fault. The file that
   FILE_FAULTS_HIT names is created at the first fault. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { NONE, FAIL, LATE, SHORT };
static int calls; /* of the operation on such a path, in this process */
static int owner;

static int fault(const char *operation, const char *path) {
  const char *rule = getenv("FILE_FAULTS");
  char op[16], part[256], action[16];
  int number, first, count;
  if (!rule || !*rule || !path) return NONE;
  if (sscanf(rule, "%15[^|]|%255[^|]|%15[^|]|%d|%d|%d", op, part, action, &number, &first, &count) != 6) return NONE;
  if (strcmp(op, operation) || !strstr(path, part)) return NONE;
  if (owner != getpid()) owner = getpid(), calls = 0;
  int call = __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
  if (call < first || call - first >= count) return NONE;
  const char *hit = getenv("FILE_FAULTS_HIT");
  if (hit) syscall(SYS_mknodat, AT_FDCWD, hit, S_IFREG | 0600, 0);
  errno = number;
  return !strcmp(action, "late") ? LATE : !strcmp(action, "short") ? SHORT : FAIL;
}

static const char *path_of(int descriptor, char *path, size_t size) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t length = readlink(link, path, size - 1);
  if (length < 0) return NULL;
  path[length] = 0;
  return path;
}

static int fault_at(const char *operation, int descriptor) {
  char path[4096];
  return getenv("FILE_FAULTS") ? fault(operation, path_of(descriptor, path, sizeof path)) : NONE;
}

#define NEXT(type, name, ...) \
  static type (*next)(__VA_ARGS__); \
  if (!next) next = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)
#define APPLY(found, done) \
  do { \
    int number, what = (found); \
    number = errno; \
    if (what == LATE && (done) < 0) return -1; \
    if (what != NONE) return errno = number, -1; \
  } while (0)
#define OPENS(name, given, ...) \
  mode_t mode = 0; \
  if (flags & (O_CREAT | O_TMPFILE)) { va_list more; va_start(more, flags); mode = va_arg(more, mode_t); va_end(more); } \
  NEXT(int, name, __VA_ARGS__, ...); \
  if (flags & (O_WRONLY | O_RDWR)) APPLY(fault("open", path), -1); \
  return next given

int open(const char *path, int flags, ...) { OPENS("open", (path, flags, mode), const char *, int); }
int open64(const char *path, int flags, ...) { OPENS("open64", (path, flags, mode), const char *, int); }
int openat(int at, const char *path, int flags, ...) { OPENS("openat", (at, path, flags, mode), int, const char *, int); }

ssize_t write(int fd, const void *from, size_t size) {
  NEXT(ssize_t, "write", int, const void *, size_t);
  int what = fault_at("write", fd);
  if (what == FAIL) return -1;
  return next(fd, from, what == SHORT && size > 1 ? size / 2 : size);
}

ssize_t read(int fd, void *into, size_t size) {
  NEXT(ssize_t, "read", int, void *, size_t);
  APPLY(fault_at("read", fd), -1);
  return next(fd, into, size);
}

int fsync(int fd) {
  NEXT(int, "fsync", int);
  APPLY(fault_at("fsync", fd), next(fd));
  return next(fd);
}

int rename(const char *from, const char *to) {
  NEXT(int, "rename", const char *, const char *);
  APPLY(fault("rename", to), next(from, to));
  return next(from, to);
}

int renameat(int a, const char *from, int b, const char *to) {
  NEXT(int, "renameat", int, const char *, int, const char *);
  APPLY(fault("rename", to), next(a, from, b, to));
  return next(a, from, b, to);
}

int mkdir(const char *path, mode_t mode) {
  NEXT(int, "mkdir", const char *, mode_t);
  APPLY(fault("mkdir", path), next(path, mode));
  return next(path, mode);
}

int unlink(const char *path) {
  NEXT(int, "unlink", const char *);
  APPLY(fault("unlink", path), next(path));
  return next(path);
}

int flock(int fd, int operation) {
  NEXT(int, "flock", int, int);
  APPLY(fault_at("flock", fd), -1);
  return next(fd, operation);
}
