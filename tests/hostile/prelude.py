# Stands before every hostile program: an attack says how it was stopped, or that it was not.
import ctypes as _ctypes
import os as _os
import platform as _platform

_NUMBERS = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "mount": (165, 40),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "setns": (308, 268),
    "chroot": (161, 51),
    "pivot_root": (155, 41),
    "add_key": (248, 217),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "io_uring_setup": (425, 425),
    "userfaultfd": (323, 282),
    "kexec_load": (246, 104),
    "init_module": (175, 105),
    "capset": (126, 91),
    "personality": (135, 92),
    "clone3": (435, 435),
    "clone": (56, 220),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "shmget": (29, 194),
    "mq_open": (240, 180),
    "fsopen": (430, 430),
    "open_tree": (428, 428),
    "open_by_handle_at": (304, 265),
    "swapon": (167, 224),
    "reboot": (169, 142),
    "clock_settime": (227, 112),
    "seccomp": (317, 277),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
    "sethostname": (170, 161),
    "landlock_create_ruleset": (444, 444),
    "syslog": (103, 116),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "vmsplice": (278, 75),
    "splice": (275, 76),
    "ioctl": (16, 29),
    "rt_sigqueueinfo": (129, 138),
    "setuid": (105, 146),
    "finit_module": (313, 273),
    "memfd_secret": (447, 447),
    "name_to_handle_at": (303, 264),
}


def call(name, *values):
    """A system call by its number; an error of the kernel is raised."""
    number = _NUMBERS[name][_platform.machine() == "aarch64"]
    libc = _ctypes.CDLL(None, use_errno=True)
    words = [_ctypes.c_long(v) if isinstance(v, int) else v for v in values]
    result = libc.syscall(_ctypes.c_long(number), *words)
    if result < 0:
        raise OSError(_ctypes.get_errno(), _os.strerror(_ctypes.get_errno()))
    return result


def attack(work):
    """Try it at once."""
    try:
        result = work()
    except BaseException as error:
        kinds = " ".join(kind.__name__ for kind in type(error).__mro__)
        print("stopped by", kinds, error, flush=True)
    else:
        print("ESCAPED", result, flush=True)
