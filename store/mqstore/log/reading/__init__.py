"""Reading: messages by queue, offset, key and time, in this process or while another one writes."""
