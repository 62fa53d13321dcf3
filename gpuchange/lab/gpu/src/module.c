/* A kernel module's file with the sections that modinfo and the lab's modprobe read. It is never executed. */
#define INFO(name, text) \
    static const char name[] __attribute__((used, section(".modinfo"), aligned(1))) = text

INFO(version, "version=" DRIVER_VERSION);
INFO(license, "license=NVIDIA");
INFO(name, "name=" MODULE_NAME);
INFO(depends, "depends=" MODULE_DEPENDS);
INFO(supported, "supported=external");
INFO(vermagic, "vermagic=" KERNEL_RELEASE " SMP preempt mod_unload ");
#ifdef MODULE_FIRMWARE
INFO(firmware, "firmware=nvidia/" DRIVER_VERSION "/gsp_ga10x.bin");
INFO(alias, "alias=pci:v000010DEd*sv*sd*bc03sc02i00*");
#endif
